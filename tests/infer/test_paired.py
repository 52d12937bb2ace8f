"""How many times as many tokens are accepted, over pairs of prompts."""

from __future__ import annotations

import math

import pytest

from infer.metrics import Round, Stats
from infer.paired import times


def stats(*emitted: int, looped: tuple[int, ...] = ()) -> Stats:
    """One prompt whose rounds emitted so many tokens; those of ``looped`` lie in loops."""
    return Stats(log=[Round(5, 5, n - 1, n, looped=i in looped) for i, n in enumerate(emitted)])


def test_it_is_of_pooled_counts() -> None:
    ours, theirs = [stats(3, 3), stats(5)], [stats(2, 2, 2), stats(3, 1)]
    # (2 + 2 + 4) / 3 rounds over (1 + 1 + 1 + 2 + 0) / 5 rounds
    assert times(ours, theirs).value == pytest.approx((8 / 3) / (5 / 5))


def test_prompts_are_drawn_as_pairs() -> None:
    """Ours is always twice theirs, however hard the prompt: the interval has no width."""
    theirs = [stats(*[1 + n]) for n in range(1, 9)]
    ours = [stats(*[1 + 2 * n]) for n in range(1, 9)]
    found = times(ours, theirs)
    assert (found.value, found.low, found.high) == (2.0, 2.0, 2.0)
    shuffled = times(ours, theirs[::-1])
    assert shuffled.value == 2.0 and shuffled.low < 1.5 < 2.5 < shuffled.high
    assert times(ours, theirs[::-1]) == shuffled, "the same draws each time"


def test_rounds_in_loops_are_left_out_on_both_sides() -> None:
    ours, theirs = [stats(9, 3, looped=(0,))], [stats(9, 9, 2, looped=(0, 1))]
    assert times(ours, theirs).value == 2.0
    assert times(ours, theirs, without_loops=False).value == pytest.approx(5.0 / (17 / 3))


def test_sides_without_a_figure() -> None:
    assert times([stats(3)], [stats(1)]).value == math.inf
    assert math.isnan(times([stats(3)], [stats(2, looped=(0,))]).value)
    with pytest.raises(ValueError, match="1 and 2 prompts are no pairs"):
        times([stats(3)], [stats(1), stats(1)])
