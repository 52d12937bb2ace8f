"""Odds of copies by the length of the match."""

from __future__ import annotations

import pytest

from infer.matches import CLASSES, Matches


def test_before_anything_is_seen_a_match_of_m_holds_with_m_in_m_and_2() -> None:
    matches = Matches()
    assert [matches.holds(m) for m in (1, 2, 3, 8)] == pytest.approx([1 / 3, 1 / 2, 3 / 5, 4 / 5])
    # each accepted token makes the match one longer: 1/2, then 3/5 of it, then 4/6 of that
    assert matches.joint(2, 3) == pytest.approx([0.5, 0.3, 0.2])


def test_a_chain_speaks_for_the_lengths_that_it_passed() -> None:
    matches = Matches()
    for _ in range(60):
        matches.observe(2, 4, 2)  # a match of 2 held, then of 3, and of 4 it did not; 5 was never looked at
    assert matches.holds(2) > 0.85 and matches.holds(3) > 0.85
    assert matches.holds(4) < 0.15
    assert 0.6 < matches.holds(6) < 0.85


def test_lengths_learn_from_each_other() -> None:
    """Expected of the first match of 3: odds of 3 to 2. It held, where 0.6 was to hold and 0.4 was not: they become
    3/2 · (1 + 4)/(0.6 + 4) · (0.4 + 4)/(0 + 4) to 1; and 4/2 becomes as much more for a match of 4."""
    matches = Matches()
    matches.observe(3, 1, 1)
    factor = 5 / 4.6 * 4.4 / 4
    assert matches.holds(4) == pytest.approx(2 * factor / (1 + 2 * factor))
    prior = 1.5 * factor / (1 + 1.5 * factor)
    assert matches.holds(3) == pytest.approx((1 + 6 * prior) / 7)


def test_a_text_that_is_not_copied_is_found_out_in_a_few_rounds() -> None:
    matches = Matches()
    for length in (4, 9, 3, 6):
        matches.observe(length, 10, 0)
    assert sum(matches.joint(14, 10)) < 0.6 * sum(Matches().joint(14, 10))


def test_what_is_not_tried_goes_back_to_the_prior() -> None:
    matches = Matches()
    for _ in range(60):
        matches.observe(2, 1, 0)
    low = matches.holds(2)
    for _ in range(400):
        matches.observe(9, 1, 1)
    assert low < 0.12 and matches.holds(2) > 0.45


def test_every_length_has_a_class() -> None:
    matches = Matches()
    for length in range(1, 40):
        matches.observe(length, 1, 1)
        assert matches.holds(length) > length / (length + 2)
    assert CLASSES[0] == 1
