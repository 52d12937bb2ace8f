"""Trees of sampled tokens: what each was drawn from, what shapes they get, and what the shapes depend on."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from heads.draft import Draft
from heads.drawn import without
from heads.grow import Budget, Sampler, grow
from tests.heads.test_grow import VOCAB, Path, Scripted, paths_of, table

SHAPE = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
BUDGETS = {"static": Budget.static(SHAPE), "by confidence": Budget(rows=9, depth=3, width=3)}


def seeded(seed: int, **options: float) -> Sampler:
    return Sampler(generator=torch.Generator().manual_seed(seed), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [None, torch.tensor([2, 5, 7, 11, 13, 40])])
@pytest.mark.parametrize("budget", BUDGETS)
def test_every_token_comes_with_what_it_was_drawn_from(
    budget: str, ids: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, asked = table(2), []
    draw = Sampler.draw

    def spy(sampler: Sampler, q: Tensor) -> int:
        asked.append(q)
        return draw(sampler, q)

    monkeypatch.setattr(Sampler, "draw", spy)
    sampler = seeded(0, temperature=0.7, top_k=5)
    draft = grow(Scripted(logits, ids), BUDGETS[budget], sampler, ids)
    assert len(draft) == BUDGETS[budget].rows - 1 or budget == "static"
    assert all(q is drawn for q, drawn in zip(draft.q, asked, strict=True)), "the very tensors, in order"
    names = list(range(VOCAB)) if ids is None else ids.tolist()
    for parent in range(-1, len(draft)):
        path = tuple(names.index(draft.tokens[i]) for i in draft.path(parent))
        expected = sampler.distribution(logits(path))
        for child in draft.children(parent):
            place, q = names.index(draft.tokens[child]), draft.q[child]
            assert q is not None and q.dtype == torch.float32
            torch.testing.assert_close(q, expected / expected.sum())
            whole = sampler.distribution(logits(path))
            assert draft.scores[child] == pytest.approx(math.log(float(whole[place])), abs=1e-6)
            expected[place] = 0  # for the next sibling


def shape_of(draft: Draft) -> list[tuple[int, ...]]:
    """Rank paths, by order of draw."""
    ranks: list[tuple[int, ...]] = []
    for node, parent in enumerate(draft.parents):
        before = ranks[parent] if parent >= 0 else ()
        ranks.append((*before, draft.children(parent).index(node)))
    return ranks


def test_a_static_tree_has_its_shape() -> None:
    draft = grow(Scripted(table(3)), BUDGETS["static"], seeded(1), None)
    assert sorted(shape_of(draft)) == sorted(SHAPE)


def test_ranks_count_draws() -> None:
    """A third child without a second would have been drawn without a token that nobody sees."""
    draft = grow(Scripted(table(3)), Budget.static([(1,), (4,), (4, 2)]), seeded(1), None)
    assert sorted(shape_of(draft)) == [(0,), (1,), (1, 0)]


def test_siblings_end_with_the_support() -> None:
    wide = Budget.static([(rank,) for rank in range(6)])
    assert len(grow(Scripted(table(3)), wide, seeded(1, top_k=2), None)) == 2
    assert sorted(grow(Scripted(table(3)), wide, seeded(1), None).tokens) == list(range(6))
    for depth in (1, 3):
        chain = grow(Scripted(table(3)), Budget(rows=9, depth=depth, width=4), seeded(1, top_k=1), None)
        assert chain.is_chain and len(chain) == depth, "where one token is possible the tree is a chain"


def test_without() -> None:
    q = torch.tensor([0.5, 0.3, 0.2])
    rest = without(q, 0)
    assert rest is not None and rest.tolist() == pytest.approx([0, 0.6, 0.4])
    assert q.tolist() == pytest.approx([0.5, 0.3, 0.2]), "what was drawn from stays as it was"
    assert without(torch.tensor([0.0, 1.0]), 1) is None


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 20), st.integers(0, 5), st.integers(2, 8), st.floats(0.1, 8))
def test_budgets_are_kept(seed: int, rows: int, depth: int, width: int, sharpness: float) -> None:
    draft = grow(Scripted(table(seed, sharpness=sharpness)), Budget(rows, depth, width), seeded(seed), None)
    assert len(draft) <= rows - 1 and max(draft.depths, default=0) <= depth
    assert all(len(draft.children(node)) <= width for node in range(-1, len(draft)))
    paths = paths_of(draft)
    assert len(set(paths)) == len(paths), "siblings are different tokens"
    assert (len(draft) > 0) == (rows > 1 and depth > 0)


def test_sharp_distributions_make_deep_trees_and_flat_ones_wide() -> None:
    budget = Budget(rows=9, depth=4, width=6)
    sharp = grow(Scripted(table(5, sharpness=6)), budget, seeded(0), None)
    flat = grow(Scripted(table(5, sharpness=0.1)), budget, seeded(0), None)
    assert max(sharp.depths) > max(flat.depths)
    assert len(sharp.children(-1)) < len(flat.children(-1)) == 6


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_shape_knows_distributions_and_not_what_was_drawn(budget: str) -> None:
    """The same distribution everywhere: whatever is drawn, the shape is one."""
    drafts = [grow(Scripted(lambda path: table(6)(())), BUDGETS[budget], seeded(seed), None) for seed in range(20)]
    assert len({draft.parents for draft in drafts}) == 1
    assert len({draft.tokens for draft in drafts}) > 10


def test_what_hangs_from_a_node_knows_nothing_of_its_younger_siblings() -> None:
    """Among drafts with the same first child, the tree below it is the same shape, whatever else was drawn."""
    logits = table(7, sharpness=3)
    below: dict[Path, set[tuple[int, int]]] = defaultdict(set)
    for seed in range(120):
        draft = grow(Scripted(logits), Budget(rows=12, depth=3, width=3), seeded(seed), None)
        first = draft.children(-1)[0]
        size = sum(first in draft.path(node) for node in range(len(draft)))
        below[draft.tokens[first],].add((size, len(draft.children(first))))
    assert len(below) > 2 and all(len(seen) == 1 for seen in below.values())


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("budget", BUDGETS)
def test_broken_logits_draft_badly_instead_of_crashing(broken: float, everywhere: bool, budget: str) -> None:
    def logits(path: Path) -> Tensor:
        values = table(8)(path)
        values[slice(None) if everywhere else 2] = broken
        return values

    draft = grow(Scripted(logits), BUDGETS[budget], seeded(0, top_p=0.9), None)
    assert 1 <= len(draft) <= BUDGETS[budget].rows - 1
    for node, q in enumerate(draft.q):
        assert q is not None and bool(torch.isfinite(q).all()) and float(q[draft.tokens[node]]) > 0
