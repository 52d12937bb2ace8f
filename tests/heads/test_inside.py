"""Rows that ride along: where they stand, what they see, how a budget is shared between them and drafted tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heads.draft import Draft
from heads.grow import Budget
from heads.inside import ExtraRows
from heads.mtp_rows import HELD, ends, place, reserved

TREE = Draft((5, 6, 7, 8), (-1, -1, 0, 2), (None,) * 4, scores=(math.log(0.5), math.log(0.25), math.log(0.8), 0.0))


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    n = draw(st.integers(0, 9))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(n))
    scores = tuple(draw(st.floats(-9, 0)) for _ in range(n)) if draw(st.booleans()) else ()
    return Draft(tuple(range(n)), parents, (None,) * n, scores=scores)


def test_where_rows_stand_and_what_they_see() -> None:
    rows = ExtraRows((-1, -1, 2, 1, 2))
    assert rows.slots == (0, 1, 0, 0, 1)
    assert rows.depths(TREE) == [1, 2, 3, 2, 4]
    assert rows.behind(2) == [2, 4] and rows.behind(0) == []
    seen = rows.visibility(TREE).int().tolist()
    assert [row[:5] for row in seen[:5]] == TREE.visibility().int().tolist()
    assert all(row[5:] == [0] * 5 for row in seen[:5]), "no verified row sees one of them"
    assert seen[5:] == [
        [1, 0, 0, 0, 0, 1, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0, 1, 0, 0],
        [1, 0, 1, 0, 0, 0, 0, 0, 1, 0],
        [1, 1, 0, 1, 0, 0, 0, 1, 0, 1],
    ]


def test_where_acceptance_ends_by_the_drafts_own_word() -> None:
    assert ends(TREE) == pytest.approx([0.25, 0.1, 0.25, 0.0, 0.4])
    assert ends(Draft.empty()) == [1.0]
    assert ends(Draft.chain([3, 4])) == pytest.approx([1 - HELD, HELD * (1 - HELD), HELD**2])
    drawn = Draft.chain([3], [torch.full((8,), 1 / 8)], scores=[-9.0])
    assert ends(drawn) == pytest.approx([1 - HELD, HELD]), "a drawn token's own probability says little"
    assert ends(Draft.chain([3], scores=[math.nan])) == pytest.approx([1 - HELD, HELD])


@given(drafts(), st.integers(0, 40), st.integers(1, 6), st.integers(1, 12))
def test_masks_are_placed_behind_all_nodes_and_no_further_than_there_is_room(
    draft: Draft, spare: int, slots: int, room: int
) -> None:
    rows = place(draft, spare, slots, room)
    most = {node: max(0, min(slots, room - (draft.depths[node] if node >= 0 else 0))) for node in range(-1, len(draft))}
    assert len(rows) == min(spare, sum(most.values()))
    counts = {node: len(rows.behind(node)) for node in most}
    assert all(counts[node] <= most[node] for node in most)
    assert max(rows.depths(draft), default=0) <= room
    if spare >= len(most):
        assert all(count > 0 for node, count in counts.items() if most[node]), "a draft is there wherever it ends"
    assert list(rows.after) == sorted(rows.after)


def test_masks_go_where_they_are_likely_to_be_used() -> None:
    sure = Draft.chain([3, 4], scores=[-0.01, -0.01])
    assert [len(place(sure, 7, 4, 9).behind(node)) for node in (-1, 0, 1)] == [2, 1, 4]
    hopeless = Draft.chain([3, 4], scores=[-9.0, -9.0])
    assert [len(place(hopeless, 7, 4, 9).behind(node)) for node in (-1, 0, 1)] == [4, 2, 1]
    assert [len(place(sure, 2, 4, 9).behind(node)) for node in (-1, 0, 1)] == [1, 0, 1]


@pytest.mark.parametrize(("rows", "tokens"), [(2, 1), (3, 1), (4, 1), (6, 1), (7, 2), (8, 2), (16, 3), (36, 5)])
def test_a_chain_drafts_as_far_as_masks_can_draft_again(rows: int, tokens: int) -> None:
    kept = reserved(Budget(rows, 9))
    assert kept.width == 1 and min(kept.depth, kept.rows - 1) == tokens
    if rows >= 4:
        assert (1 + tokens) * (1 + 1) <= rows, "each node has a mask"


@pytest.mark.parametrize(("rows", "tokens"), [(2, 1), (8, 2), (16, 4), (32, 10), (64, 20)])
def test_a_tree_verifies_with_a_third_of_its_rows(rows: int, tokens: int) -> None:
    kept = reserved(Budget(rows, 4, 3))
    assert (kept.rows - 1, kept.width) == (tokens, 3) and min(kept.depth, tokens) == min(4, tokens)
    shape = Budget.static([(0,), (1,), (0, 0), (0, 1), (1, 0)])
    assert reserved(shape).shape == ((0,),)
    assert reserved(Budget(1, 3)).rows == 1
