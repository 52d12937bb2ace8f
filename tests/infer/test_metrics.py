"""Figures: literal values, loops, pooling."""

from __future__ import annotations

import pytest

from infer.metrics import (
    Round,
    Stats,
    conditional_acceptance,
    in_loop,
    loop_free,
    mark_loops,
    pooled,
)


def stats_of(accepted: list[int], depth: int = 3) -> Stats:
    log = [Round(proposed=depth, depth=depth, accepted=a, emitted=a + 1, seconds=0.1) for a in accepted]
    return Stats(tokens=1 + sum(r.emitted for r in log), prefill_seconds=0.5, log=log)


def test_the_case_book() -> None:
    """Four rounds of three drafted tokens, 3, 1, 0 and 2 accepted."""
    stats = stats_of([3, 1, 0, 2])
    assert stats.rounds == 4
    assert (stats.proposed, stats.accepted) == (12, 6)
    assert stats.accepted / stats.rounds == 1.5
    assert stats.tokens_per_round == 2.5
    assert stats.acceptance_rate == 0.5
    assert stats.accepted_per_position == [0.75, 0.5, 0.25]
    assert conditional_acceptance(stats.log) == pytest.approx([0.75, 2 / 3, 0.5])
    assert 1 + sum(stats.accepted_per_position) == stats.tokens_per_round
    assert stats.tokens == 11
    assert stats.decode_seconds == pytest.approx(0.4)


def test_nothing_decoded_divides_by_nothing() -> None:
    empty = Stats()
    assert empty.to_dict()["tokens_per_round"] == 0
    assert empty.accepted_per_position == []
    assert conditional_acceptance([]) == []
    assert pooled([empty]) == (0, 0, 0)


def test_conditional_acceptance_counts_rounds_that_drafted_so_far() -> None:
    log = [Round(3, 3, 1, 2), Round(1, 1, 1, 2), Round(3, 3, 2, 3)]
    assert conditional_acceptance(log) == pytest.approx([1.0, 0.5, 0.0])


def test_loops_are_eight_grams_seen_before() -> None:
    text = list(range(10)) + list(range(8))  # the second eight repeat the first
    assert in_loop(text) == [False] * 10 + [True] * 8
    assert in_loop(list(range(10)) + list(range(7))) == [False] * 17
    assert in_loop([1] * 9) == [False] + [True] * 8  # overlapping: the second 8-gram is the first again
    assert in_loop([]) == []


def test_loop_free_rounds() -> None:
    output = [99, *range(8), *range(8), 50]
    log = [Round(3, 3, 3, n) for n in (4, 4, 4, 4, 1)]
    stats = Stats(tokens=18, log=log)
    mark_loops(stats.log, output)
    assert [r.looped for r in log] == [False, False, True, True, False]
    assert loop_free(stats) == [log[0], log[1], log[4]]
    assert len(loop_free([stats, stats])) == 6
    assert pooled([stats], without_loops=True).value == pytest.approx(9 / 3)
    assert pooled([stats]).value == pytest.approx(17 / 5)


def test_a_round_half_inside_a_loop_counts() -> None:
    output = [99, *range(8), *range(8)]
    log = [Round(5, 5, 5, n) for n in (6, 6, 4)]
    mark_loops(log, output)
    assert [r.looped for r in log] == [False, False, True]


def test_pooling_is_sum_over_sum() -> None:
    long, short = stats_of([3] * 10), stats_of([0])
    whole = pooled([long, short])
    assert whole.value == pytest.approx(41 / 11)
    assert 1.0 <= whole.low < whole.value <= whole.high <= 4.0
    assert whole == pooled([long, short])  # the interval repeats
    assert pooled([long] * 5) == (4.0, 4.0, 4.0)
