"""The draft tree: what follows from parents alone, over random trees, against the plainest reading of each word."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heads.draft import Draft

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)
EXAMPLE = Draft((10, 11, 12, 13), (-1, -1, 0, 1), (None,) * 4, scores=(-0.1, -0.2, -0.3, -0.4))


@st.composite
def trees(draw: st.DrawFn, largest: int = 12) -> Draft:
    """Any tree: each node hangs from the root or from a node before it."""
    n = draw(st.integers(0, largest))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(n))
    q = tuple(torch.full((3,), float(node)) if draw(st.booleans()) else None for node in range(n))
    return Draft(
        tuple(100 + node for node in range(n)),
        parents,
        q,
        scores=tuple(-float(node) for node in range(n)),
        sources=tuple(f"drafter {node}" for node in range(n)),
    )


def ancestors(draft: Draft, node: int) -> set[int]:
    """Of a node, itself included, the root (-1) too."""
    return {-1} if node < 0 else {node} | ancestors(draft, draft.parents[node])


@SETTINGS
@given(trees())
def test_a_row_sees_its_ancestors_and_itself(draft: Draft) -> None:
    visible = draft.visibility()
    assert visible.dtype == torch.bool and visible.shape == (len(draft) + 1, len(draft) + 1)
    for node in range(-1, len(draft)):
        assert {column - 1 for column in visible[node + 1].nonzero()[:, 0].tolist()} == ancestors(draft, node)


@SETTINGS
@given(trees())
def test_depths_paths_and_children(draft: Draft) -> None:
    for node in range(len(draft)):
        path = draft.path(node)
        assert set(path) == ancestors(draft, node) - {-1}
        assert path == sorted(path) and path[-1] == node
        assert draft.depths[node] == len(path)
    for node in range(-1, len(draft)):
        assert draft.children(node) == [child for child in range(len(draft)) if draft.parents[child] == node]
    assert draft.path(-1) == []
    assert draft.is_chain == (list(draft.depths) == list(range(1, len(draft) + 1)))


@SETTINGS
@given(trees(), st.none() | st.integers(0, 5), st.none() | st.integers(0, 8))
def test_shortened_drafts_keep_ancestors_and_what_belongs_to_each_node(
    draft: Draft, depth: int | None, nodes: int | None
) -> None:
    short = draft.shorten(depth=depth, nodes=nodes)
    fitting = [node for node in range(len(draft)) if depth is None or draft.depths[node] <= depth]
    kept = fitting if nodes is None else fitting[:nodes]
    assert short.tokens == tuple(draft.tokens[node] for node in kept)
    for place, node in enumerate(kept):
        # tokens are distinct here, so that equal paths of tokens are equal paths
        assert [short.tokens[i] for i in short.path(place)] == [draft.tokens[i] for i in draft.path(node)]
        assert short.q[place] is draft.q[node]
        assert short.scores[place] == draft.scores[node]
        assert short.sources[place] == draft.sources[node]


def test_the_tree_of_the_docstring() -> None:
    assert EXAMPLE.depths == (1, 1, 2, 2)
    assert EXAMPLE.visibility().int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 0, 1, 0, 1],
    ]
    assert EXAMPLE.path(3) == [1, 3]
    assert [EXAMPLE.children(node) for node in (-1, 0, 3)] == [[0, 1], [2], []]
    assert EXAMPLE.shorten(depth=1).tokens == (10, 11)
    assert EXAMPLE.shorten(nodes=3).parents == (-1, -1, 0)
    assert EXAMPLE.shorten(depth=5, nodes=9) is EXAMPLE


def test_chains_and_the_empty_draft() -> None:
    chain = Draft.chain([5, 6, 7])
    assert chain.is_chain and chain.parents == (-1, 0, 1) and chain.q == (None, None, None)
    assert torch.equal(chain.visibility(), torch.ones(4, 4).tril().bool())
    empty = Draft.empty()
    assert len(empty) == 0 and empty.is_chain and empty.visibility().tolist() == [[True]]
    assert empty.shorten(depth=0) is empty


@SETTINGS
@given(st.sets(st.integers(0, 19), min_size=1), st.data())
def test_q_of_a_draft_vocabulary_lands_on_its_target_ids(ids: set[int], data: st.DataObject) -> None:
    kept = torch.tensor(sorted(ids))
    q = torch.rand(len(ids), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    full = Draft.chain([int(kept[0])], [q / q.sum()], kept).full_q(0, 20)
    assert full.shape == (20,) and full.dtype == torch.float32
    assert torch.equal(full[kept], q / q.sum())
    assert float(full.sum()) == pytest.approx(1, abs=1e-6) and int((full != 0).sum()) <= len(ids)


def test_full_q_by_hand() -> None:
    q = torch.tensor([0.2, 0.3, 0.5])
    assert Draft.chain([5], [q], torch.tensor([2, 5, 7])).full_q(0, 8).tolist() == pytest.approx(
        [0, 0, 0.2, 0, 0, 0.3, 0, 0.5]
    )
    assert Draft.chain([1], [q]).full_q(0, 5).tolist() == pytest.approx([0.2, 0.3, 0.5, 0, 0])  # a padded vocabulary
    assert Draft.chain([3]).full_q(0, 5).tolist() == [0, 0, 0, 1, 0]  # chosen: nothing but one-hot is its q


def test_a_q_over_other_tokens_is_refused() -> None:
    q = torch.tensor([0.2, 0.3, 0.5])
    with pytest.raises(ValueError, match="3 entries for 2 tokens of the target"):
        Draft.chain([1], [q]).full_q(0, 2)
    with pytest.raises(ValueError, match="3 entries for 2 ids of the draft"):
        Draft.chain([1], [q], torch.tensor([1, 4])).full_q(0, 8)


@pytest.mark.parametrize("parents", [(0,), (-2,), (-1, 1), (-1, 2, 0), (1, -1)])
def test_parents_that_do_not_stand_before_their_children_are_refused(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="parent must stand before"):
        Draft(tuple(range(len(parents))), parents, (None,) * len(parents))


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="as many parents and q as tokens"):
        Draft((1, 2), (-1,), (None, None))
    with pytest.raises(ValueError, match="as many parents and q as tokens"):
        Draft((1, 2), (-1, 0), (None,))
    with pytest.raises(ValueError, match="scores"):
        Draft((1, 2), (-1, 0), (None, None), scores=(-0.5,))
    with pytest.raises(ValueError, match="as many sources as tokens"):
        Draft((1, 2), (-1, 0), (None, None), sources=("lookup",))
