"""Look-ahead: static trees are the best there are, expected tokens exact, and plain decoding wins where it should."""

from __future__ import annotations

import itertools
import random

import pytest

from heads.grow import Budget
from infer.lookahead import PLAIN, Acceptance, CostTable, best_budget, candidates, expected_tokens, static_tree

RANKS = ((0.5, 0.2, 0.1), (0.4, 0.15, 0.05), (0.3, 0.1, 0.02))
ODD = ((0.1, 0.4, 0.2), (0.2, 0.5, 0.1), (0.3, 0.3, 0.1))  # a second guess may be the better one
FLAT = {1: 0.040, 8: 0.042, 16: 0.047, 32: 0.059, 64: 0.091}


def trees(size: int) -> set[frozenset[tuple[int, ...]]]:
    """Every tree of ``size`` nodes, at most 3 deep and 3 wide."""
    found = {frozenset[tuple[int, ...]]()}
    for _ in range(size):
        found = {
            tree | {path}
            for tree in found
            for parent in [(), *tree]
            if len(parent) < 3
            for rank in range(3)
            if (path := (*parent, rank)) not in tree
        }
    return found


@pytest.mark.parametrize("ranks", [RANKS, ODD])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_no_other_tree_of_that_size_yields_more(size: int, ranks: tuple[tuple[float, ...], ...]) -> None:
    best = max(expected_tokens(tuple(tree), ranks) for tree in trees(size))
    shape = static_tree(ranks, size + 1)
    assert len(shape) == size
    assert expected_tokens(shape, ranks) == pytest.approx(best, abs=1e-12)
    Budget.static(shape)  # parents are there


def test_expected_tokens_is_the_mean_over_every_way_the_target_can_go() -> None:
    shape = ((0,), (1,), (0, 0), (0, 1), (1, 0))
    mean = 0.0
    # at each depth the target takes one of three ranks, or none of them (3)
    for way in itertools.product(range(4), repeat=2):
        chance = 1.0
        for depth, rank in enumerate(way):
            chance *= RANKS[depth][rank] if rank < 3 else 1 - sum(RANKS[depth])
        length = next((n for n in (0, 1) if way[: n + 1] not in shape), 2)
        mean += chance * (length + 1)
    assert expected_tokens(shape, RANKS) == pytest.approx(mean, abs=1e-12)


def test_a_chain_is_the_tree_of_rank_zero() -> None:
    assert static_tree(((0.9,), (0.8,)), 3) == ((0,), (0, 0))
    assert expected_tokens(((0,), (0, 0)), ((0.9,), (0.8,))) == pytest.approx(1 + 0.9 + 0.72)


def test_a_tree_leaves_out_what_never_happens() -> None:
    assert static_tree(((0.5, 0.0), (0.0,)), 10) == ((0,),)


def test_plain_decoding_when_drafts_do_not_pay() -> None:
    dear = CostTable(rows=FLAT, drafts={(1, 1): 0.03, (5, 1): 0.15}, context=100)
    assert best_budget(dear, Acceptance(joint=(0.4, 0.2, 0.1))) == PLAIN
    useless = CostTable(rows=FLAT, drafts={(1, 1): 0.001, (5, 1): 0.005}, context=100)
    assert best_budget(useless, Acceptance(joint=(0.01, 0.0))) == PLAIN


def test_the_look_ahead_follows_the_costs() -> None:
    joint = tuple(0.7**i for i in range(1, 9))
    cheap = CostTable(rows=FLAT, drafts={(1, 1): 0.0005, (8, 1): 0.004}, context=100)
    dearer = CostTable(rows=FLAT, drafts={(1, 1): 0.008, (8, 1): 0.064}, context=100)
    long, short = best_budget(cheap, Acceptance(joint=joint)), best_budget(dearer, Acceptance(joint=joint))
    assert long.width == short.width == 1
    assert long.depth > short.depth > 0
    assert long.rows == long.depth + 1


def test_a_tree_wins_where_rows_are_cheap_and_a_chain_where_they_are_not() -> None:
    acceptance = Acceptance(joint=(0.5, 0.2, 0.06), ranks=RANKS, dynamic={(16, 3, 4): 2.1})
    drafts = {(1, 1): 0.002, (3, 1): 0.006, (1, 8): 0.002, (3, 8): 0.006}
    wide = CostTable(rows={1: 0.04, 64: 0.041}, drafts=drafts, context=10)
    steep = CostTable(rows={1: 0.04, 64: 0.04 * 64}, drafts=drafts, context=10)
    assert best_budget(wide, acceptance).width > 1
    assert best_budget(steep, acceptance) == PLAIN


def test_candidates_are_sorted_and_say_what_they_expect() -> None:
    costs = CostTable(rows=FLAT, drafts={(1, 1): 0.004, (5, 8): 0.02}, context=100, overhead=0.001)
    rows = candidates(costs, Acceptance(joint=(0.5, 0.3), ranks=RANKS, dynamic={(16, 5, 8): 2.2}))
    assert [row.speed for row in rows] == sorted((row.speed for row in rows), reverse=True)
    names = {row.name: row for row in rows}
    assert names["chain 2"].tokens == pytest.approx(1.8)
    assert names["plain"].seconds == pytest.approx(0.041)
    assert names["dynamic tree 16 depth 5 width 8"].seconds == pytest.approx(0.047 + 0.02 + 0.001)


def test_costs_between_and_beyond_what_was_measured() -> None:
    costs = CostTable(
        rows={1: 1.0, 3: 2.0, 5: 4.0}, drafts={(1, 1): 0.1, (3, 1): 0.3, (1, 9): 0.5, (3, 9): 1.5}, context=1
    )
    assert costs.target(2) == pytest.approx(1.5)
    assert costs.target(6) == pytest.approx(5.0)
    assert costs.draft(2, 1) == pytest.approx(0.2)
    assert costs.draft(2, 5) == pytest.approx(0.6)
    assert costs.draft(0, 5) == 0.0
    with pytest.raises(ValueError, match="measure it"):
        CostTable(rows={}, drafts={}, context=1).target(1)


def test_a_table_survives_json() -> None:
    import json

    costs = CostTable(
        rows=FLAT, drafts={(1, 1): 0.004, (5, 8): 0.02}, context=100, overhead=0.1, settings={"device": "cpu"}
    )
    assert CostTable.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs
    with pytest.raises(ValueError, match="overhead"):
        CostTable.from_dict({"rows": {}, "drafts": [], "context": 1})


def test_random_tables_never_choose_worse_than_any_candidate() -> None:
    draw = random.Random(0)
    for _ in range(50):
        costs = CostTable(
            rows={k: draw.uniform(0.01, 0.1) for k in (1, 8, 64)},
            drafts={(d, w): draw.uniform(0, 0.05) for d in (1, 5) for w in (1, 8)},
            context=1,
        )
        joint = sorted((draw.random() for _ in range(5)), reverse=True)
        acceptance = Acceptance(joint=tuple(joint), ranks=RANKS)
        best = best_budget(costs, acceptance)
        assert max(row.speed for row in candidates(costs, acceptance)) == next(
            row.speed for row in candidates(costs, acceptance) if row.budget == best
        )
