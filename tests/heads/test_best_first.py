"""Trees best first: the best of their size by brute force, never worse than by depth, in an order that can be cut."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import heads.best_first as module
from heads.best_first import Likeliest, Ranked, Ranking, best_first, depth_of, ranking
from heads.draft import Draft
from heads.grow import Budget, Sampler, grow
from tests.heads.parity import text_for
from tests.heads.small import read, small_heads, small_target
from tests.heads.test_grow import Path, Scripted, paths_of, table

VOCAB = 4


class Slots(Scripted):
    """Scripted answers for any node at any time."""

    def ranked(self, node: int, tokens: Sequence[int], parents: Sequence[int], width: int) -> Ranking:
        path = []
        while node >= 0:
            path.append(self._place(tokens[node]))
            node = parents[node]
        return ranking(self.logits(tuple(path[::-1])).log_softmax(-1), width)


def chance(logits: Callable[[Path], Tensor], path: Path) -> float:
    """Log-probability of a path."""
    return sum(float(logits(path[:i]).log_softmax(-1)[path[i]]) for i in range(len(path)))


def enumerated(logits: Callable[[Path], Tensor], depth: int, nodes: int) -> list[Path]:
    """By brute force the ``nodes`` likeliest paths, likeliest first."""
    every = [path for length in range(1, depth + 1) for path in itertools.product(range(VOCAB), repeat=length)]
    return sorted(every, key=lambda path: -chance(logits, path))[:nodes]


def mass(logits: Callable[[Path], Tensor], draft: Draft) -> float:
    """Tokens that a draft is expected to yield, were its own word true."""
    return sum(math.exp(chance(logits, path)) for path in paths_of(draft))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(2, 30), st.integers(1, 4), st.floats(0.1, 5))
def test_it_is_the_best_there_is_in_its_order(seed: int, rows: int, depth: int, sharpness: float) -> None:
    logits = table(seed, VOCAB, sharpness)
    draft = best_first(Slots(logits), Budget(rows, depth, VOCAB), None)
    assert paths_of(draft) == enumerated(logits, depth, rows - 1)
    assert draft.scores == pytest.approx([chance(logits, p) - chance(logits, p[:-1]) for p in paths_of(draft)])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(2, 24), st.integers(1, 4), st.integers(2, 4))
def test_it_is_never_worse_than_a_tree_by_depth(seed: int, rows: int, depth: int, width: int) -> None:
    logits = table(seed, VOCAB, 0.8)
    budget = Budget(rows, depth, width)
    by_depth, best = grow(Scripted(logits), budget, None, None), grow(Slots(logits), budget, None, None)
    assert mass(logits, best) >= mass(logits, by_depth) - 1e-9
    assert all(len(best.children(node)) <= width for node in range(-1, len(best))) and max(best.depths) <= depth


def test_where_a_depth_is_narrow_it_gains() -> None:
    """Two nodes of a depth that go on are 14 nodes in four depths, and leave likelier ones out."""
    logits = table(11, VOCAB, 0.6)
    budget = Budget(rows=20, depth=4, width=2)
    by_depth, best = grow(Scripted(logits), budget, None, None), grow(Slots(logits), budget, None, None)
    assert (len(by_depth), len(best)) == (14, 19)
    assert mass(logits, by_depth) == pytest.approx(1.704, abs=1e-3)
    assert mass(logits, best) == pytest.approx(1.863, abs=1e-3)


@pytest.mark.parametrize("nodes", range(1, 12))
def test_its_first_nodes_are_the_best_tree_of_so_many(nodes: int) -> None:
    logits = table(3, VOCAB)
    whole = best_first(Slots(logits), Budget(13, 4, VOCAB), None).shorten(nodes=nodes)
    assert whole == best_first(Slots(logits), Budget(1 + nodes, 4, VOCAB), None)


def test_names_are_those_of_the_draft_vocabulary_and_chains_and_draws_are_grown_as_ever() -> None:
    ids, logits = torch.tensor([3, 9, 10, 20]), table(5, VOCAB)
    named = grow(Slots(logits, ids), Budget(9, 3, 3), None, ids)
    plain = grow(Slots(logits), Budget(9, 3, 3), None, None)
    assert named.tokens == tuple(int(ids[place]) for place in plain.tokens) and named.parents == plain.parents
    assert grow(Slots(logits), Budget.chain(3), None, None) == grow(Scripted(logits), Budget.chain(3), None, None)
    shape = Budget.static([(0,), (1,), (0, 0)])
    assert grow(Slots(logits), shape, None, None) == grow(Scripted(logits), shape, None, None)
    draws = [
        grow(kind(logits), Budget(9, 3, 3), Sampler(generator=torch.Generator().manual_seed(1)), None)
        for kind in (Slots, Scripted)
    ]
    assert draws[0].tokens == draws[1].tokens and all(q is not None for q in draws[0].q)


def test_broken_logits_draft_badly_instead_of_crashing() -> None:
    for broken in (math.nan, math.inf, -math.inf):
        draft = best_first(Slots(lambda path, broken=broken: torch.full((VOCAB,), broken)), Budget(9, 3, 3), None)  # type: ignore[misc]
        assert len(draft) == 8 and len(set(paths_of(draft))) == 8


def test_depths() -> None:
    assert [depth_of(node, [-1, 0, 0, 2, -1]) for node in range(-1, 5)] == [0, 1, 2, 2, 3, 1]


# candidates of a biased slot


def biased(seed: int, rank: int = 3, vocab: int = 50) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    unary = torch.randn(vocab, generator=random, dtype=torch.float64) * 2
    return (
        unary,
        torch.randn(vocab, rank, generator=random, dtype=torch.float64),
        torch.randn(rank, generator=random, dtype=torch.float64),
    )


@pytest.mark.parametrize("candidates", [50, 80])
def test_with_all_candidates_it_is_the_biased_softmax(candidates: int) -> None:
    unary, w2, code = biased(1)
    values, places = Likeliest(unary, w2, candidates).after(code, 5)
    wanted = (unary + w2 @ code).log_softmax(-1).topk(5)
    assert places == wanted.indices.tolist() and values == pytest.approx(wanted.values.tolist(), abs=1e-5)
    assert Likeliest(unary, None, candidates).after(None, 5)[1] == unary.topk(5).indices.tolist()


def test_entries_that_are_no_candidates_keep_their_own_weight() -> None:
    unary, w2, code = biased(2)
    values, places = Likeliest(unary, w2, 10).after(code, 10)
    top = unary.topk(10).indices
    moved = unary.clone()
    moved[top] += w2[top] @ code
    assert sorted(places) == sorted(top.tolist())
    assert values == pytest.approx(moved.log_softmax(-1)[torch.tensor(places)].tolist(), abs=1e-5)


# mistakes


def last_first(heap: list[tuple[float, ...]], entry: tuple[float, ...]) -> None:
    heapq.heappush(heap, (-entry[0], *entry[1:]))


def forgetful(heap: list[tuple[float, ...]]) -> tuple[float, ...]:
    """Nodes are weighed by their own odds alone, not by their path's."""
    return (0.0, *heapq.heappop(heap)[1:])


def breadth_first(heap: list[tuple[float, ...]], entry: tuple[float, ...]) -> None:
    heapq.heappush(heap, (entry[1], *entry[1:]))


@pytest.mark.parametrize(
    ("push", "pop"),
    [(last_first, heapq.heappop), (heapq.heappush, forgetful), (breadth_first, heapq.heappop)],
    ids=["unlikeliest first", "own odds alone", "in turn"],
)
def test_a_heap_that_is_wrong_would_show(push: object, pop: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "heapq", SimpleNamespace(heappush=push, heappop=pop))
    logits = table(11, VOCAB)
    draft = best_first(Slots(logits), Budget(12, 4, VOCAB), None)
    assert paths_of(draft) != enumerated(logits, 4, 11)


# real heads


@pytest.mark.parametrize(
    "options", [{"kind": "medusa"}, {"kind": "block", "markov_rank": 0}, {"kind": "block"}], ids=str
)
def test_heads_that_answer_for_all_depths_grow_the_best_tree_of_their_own_word(options: dict[str, Any]) -> None:
    """Six tokens, three deep: against every path, scored by what the heads answer node by node."""
    made = small_heads(target=small_target(), lookahead=3, draft_vocab=6, **options)
    ids = text_for(made, 9)
    taps, _ = read(made.target, made.config.taps, ids[:, :8])
    state = made.start(taps, ids)
    assert made.draft_ids is not None
    names = made.draft_ids.tolist()

    def logits(path: Path) -> Tensor:
        grower = made.grower(state)
        parents = list(range(-1, len(path) - 1))
        with torch.no_grad():
            return grower.after([len(path) - 1], [names[p] for p in path], parents)[0] if path else grower.first()

    every = [path for length in (1, 2, 3) for path in itertools.product(range(6), repeat=length)]
    known = {path: logits(path).double().log_softmax(-1) for path in [(), *(p for p in every if len(p) < 3)]}
    score = {path: sum(float(known[path[:i]][path[i]]) for i in range(len(path))) for path in every}
    draft = made.propose(state, Budget(40, 3, 6))
    assert isinstance(made.grower(state), Ranked)
    ours = {tuple(names.index(token) for token in path) for path in paths_of(draft)}
    assert ours == set(sorted(every, key=lambda path: -score[path])[:39])
    assert list(draft.scores[:1]) == pytest.approx([max(known[()].tolist())], abs=1e-5)
