"""Growing drafts from scripted distributions: chains, static trees, trees by confidence, budgets, broken logits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from heads.draft import Draft
from heads.grow import Budget, Sampler, grow

VOCAB = 6
Path = tuple[int, ...]


class Scripted:
    """Logits by path of draft-vocabulary places, and a check of everything that is asked."""

    def __init__(self, logits: Callable[[Path], Tensor], ids: Tensor | None = None) -> None:
        self.logits = logits
        self.place = None if ids is None else {int(name): place for place, name in enumerate(ids)}
        self.asked: list[Path] = []

    def first(self) -> Tensor:
        self.asked.append(())
        return self.logits(())

    def after(self, nodes: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        draft = Draft(tuple(tokens), tuple(parents[: len(tokens)]), (None,) * len(tokens))
        assert len({draft.depths[node] for node in nodes}) == 1, "nodes of one depth"
        paths = [tuple(self._place(tokens[i]) for i in draft.path(node)) for node in nodes]
        assert not set(paths) & set(self.asked), "each node is asked for once"
        assert all(path[:-1] in self.asked for path in paths), "its parent before it"
        self.asked += paths
        return torch.stack([self.logits(path) for path in paths])

    def _place(self, token: int) -> int:
        return token if self.place is None else self.place[token]


def table(seed: int, vocab: int = VOCAB, sharpness: float = 1.5) -> Callable[[Path], Tensor]:
    """Random logits that depend on the whole path."""

    def logits(path: Path) -> Tensor:
        key = seed
        for place in path:
            key = key * 31 + place + 7
        return torch.randn(vocab, generator=torch.Generator().manual_seed(key), dtype=torch.float64) * sharpness

    return logits


def paths_of(draft: Draft) -> list[Path]:
    """Each node's path of tokens."""
    return [tuple(draft.tokens[i] for i in draft.path(node)) for node in range(len(draft))]


def best_paths(logits: Callable[[Path], Tensor], depth: int, count: int) -> set[Path]:
    """By brute force the ``count`` paths of greatest probability of all that are at most ``depth`` long."""
    found: list[tuple[float, Path]] = []
    for length in range(1, depth + 1):
        for path in itertools.product(range(VOCAB), repeat=length):
            score = sum(float(logits(path[:i]).float().log_softmax(-1)[path[i]]) for i in range(length))
            found.append((score, path))
    return {path for _, path in sorted(found, reverse=True)[:count]}


# chains


@pytest.mark.parametrize("ids", [None, torch.tensor([2, 5, 7, 11, 13, 40])])
def test_a_chain_takes_the_likeliest_token_each_time(ids: Tensor | None) -> None:
    logits = table(1)
    path: Path = ()
    draft = grow(Scripted(logits, ids), Budget.chain(4), None, ids)
    for node in range(4):
        best = int(logits(path).argmax())
        assert draft.tokens[node] == (best if ids is None else int(ids[best]))
        assert draft.scores[node] == pytest.approx(float(logits(path).log_softmax(-1)[best]), abs=1e-6)
        path = (*path, best)
    assert draft.is_chain and draft.q == (None,) * 4 and draft.ids is ids


@pytest.mark.parametrize("ids", [None, torch.tensor([2, 5, 7, 11, 13, 40])])
def test_a_sampled_chain_returns_the_very_tensors_it_drew_from(
    ids: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Tensor] = []
    draw = Sampler.draw

    def spy(sampler: Sampler, q: Tensor) -> int:
        drawn.append(q)
        return draw(sampler, q)

    monkeypatch.setattr(Sampler, "draw", spy)
    sampler = Sampler(0.7, top_k=4, top_p=0.9, generator=torch.Generator().manual_seed(0))
    draft = grow(Scripted(table(2), ids), Budget.chain(5), sampler, ids)
    assert len(draft) == 5 and all(q is d for q, d in zip(draft.q, drawn, strict=True))
    for node, q in enumerate(drawn):
        place = draft.tokens[node] if ids is None else ids.tolist().index(draft.tokens[node])
        assert q.dtype == torch.float32 and float(q.sum()) == pytest.approx(1, abs=1e-6)
        assert draft.scores[node] == pytest.approx(math.log(float(q[place])), abs=1e-6)


def test_temperature_top_k_and_top_p_by_hand() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
    assert Sampler()(logits)[1].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert Sampler(temperature=0.5)(logits)[1].tolist() == pytest.approx([1 / 30, 4 / 30, 9 / 30, 16 / 30])
    assert Sampler(top_k=2)(logits)[1].tolist() == pytest.approx([0, 0, 3 / 7, 4 / 7])
    assert Sampler(top_p=0.75)(logits)[1].tolist() == pytest.approx([0, 2 / 9, 3 / 9, 4 / 9])
    assert Sampler(top_p=0.65)(logits)[1].tolist() == pytest.approx([0, 0, 3 / 7, 4 / 7])
    assert Sampler(top_p=0.0)(logits)[1].tolist() == [0, 0, 0, 1]  # the likeliest always stays
    assert Sampler(top_k=99, top_p=1.0)(logits)[1].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    # the temperature first, then top-k, then top-p on what is left
    assert Sampler(0.5, top_k=3, top_p=0.6)(logits)[1].tolist() == pytest.approx([0, 0, 9 / 25, 16 / 25])


def test_top_p_looks_as_far_as_it_must() -> None:
    """Over a large vocabulary, flat or sharp: the same tokens as by sorting all of it."""
    for sharpness in (0.01, 1.0, 4.0):
        logits = torch.randn(3000, generator=torch.Generator().manual_seed(1)) * sharpness
        q = Sampler(top_p=0.9)(logits)[1]
        ordered, order = logits.softmax(-1).sort(descending=True)
        count = int((ordered.cumsum(-1) < 0.9).sum()) + 1
        assert set(q.nonzero().flatten().tolist()) == set(order[:count].tolist())
        torch.testing.assert_close(q[order[:count]], ordered[:count] / ordered[:count].sum())


def test_draws_follow_q_and_the_generator() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    sampler = Sampler(generator=torch.Generator().manual_seed(3))
    draws = torch.tensor([sampler(logits)[0] for _ in range(4000)])
    assert torch.allclose(draws.bincount(minlength=4) / 4000, logits.exp(), atol=0.03)
    again = Sampler(generator=torch.Generator().manual_seed(3))
    assert [again(logits)[0] for _ in range(20)] == draws[:20].tolist()


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"temperature": -1.0}, {"top_k": 0}])
def test_settings_that_leave_nothing_to_draw_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="a temperature above 0 and a top_k of 1 or more"):
        Sampler(**wrong)  # type: ignore[arg-type]


# trees


def test_a_static_tree_holds_the_asked_ranks() -> None:
    logits = table(4)
    ids = torch.tensor([3, 9, 10, 20, 21, 33])
    shape = [(0,), (2,), (0, 0), (0, 3), (2, 1), (0, 3, 0)]
    draft = grow(Scripted(logits, ids), Budget.static(shape), None, ids)
    assert len(draft) == 6 and draft.q == (None,) * 6
    wanted = {}
    for ranks in shape:
        path: Path = ()
        for rank in ranks:
            path = (*path, int(logits(path).argsort(descending=True)[rank]))
        wanted[tuple(int(ids[place]) for place in path)] = float(logits(path[:-1]).log_softmax(-1)[path[-1]])
    assert dict(zip(paths_of(draft), draft.scores, strict=True)) == pytest.approx(wanted, abs=1e-6)


def test_a_static_chain_is_the_chain() -> None:
    chain = grow(Scripted(table(5)), Budget.chain(3), None, None)
    static = grow(Scripted(table(5)), Budget.static([(0,), (0, 0), (0, 0, 0)]), None, None)
    assert (static.tokens, static.parents) == (chain.tokens, chain.parents)


def test_a_rank_beyond_the_draft_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 6 of a draft vocabulary of 6"):
        grow(Scripted(table(6)), Budget.static([(6,)]), None, None)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(2, 14), st.integers(1, 3))
def test_the_tree_by_confidence_is_the_best_there_is(seed: int, rows: int, depth: int) -> None:
    # of the best rows - 1 paths no more than that share a depth, nor a parent: this width cuts nothing off
    logits = table(seed)
    draft = grow(Scripted(logits), Budget(rows, depth, width=max(2, rows - 1)), None, None)
    assert set(paths_of(draft)) == best_paths(logits, depth, min(rows - 1, sum(VOCAB**d for d in range(1, depth + 1))))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 20), st.integers(0, 5), st.integers(1, 8), st.floats(0.1, 8))
def test_budgets_are_kept_and_nothing_hangs_in_the_air(
    seed: int, rows: int, depth: int, width: int, sharpness: float
) -> None:
    grower = Scripted(table(seed, sharpness=sharpness))
    draft = grow(grower, Budget(rows, depth, width), None, None)
    assert len(draft) <= rows - 1 and max(draft.depths, default=0) <= depth
    paths = paths_of(draft)
    assert len(set(paths)) == len(paths), "siblings are different tokens"
    assert all(path[:-1] in paths for path in paths if len(path) > 1), "ancestors are there"
    for node in range(-1, len(draft)):
        children = draft.children(node)
        assert len(children) <= width
        scores = [draft.scores[child] for child in children]
        assert scores == sorted(scores, reverse=True), "siblings are tried likeliest first"
    if rows > 1 and depth > 0:
        assert len(draft) >= min(rows - 1, depth if width == 1 else width, VOCAB)
    else:
        assert len(draft) == 0 and grower.asked == []


def test_a_narrow_tree_expands_the_likeliest_nodes_of_each_depth() -> None:
    flat = Scripted(table(7, sharpness=0.5))
    grow(flat, Budget(rows=60, depth=3, width=2), None, None)
    logits = table(7, sharpness=0.5)

    def chance(path: Path) -> float:
        return math.exp(sum(float(logits(path[:i]).log_softmax(-1)[path[i]]) for i in range(len(path))))

    def children(path: Path) -> list[Path]:
        return [(*path, int(place)) for place in logits(path).topk(2).indices]

    first = children(())
    second = sorted((child for path in first for child in children(path)), key=chance, reverse=True)[:2]
    assert sorted(flat.asked) == sorted([(), *first, *second])


def test_a_certain_child_does_not_push_its_parent_out() -> None:
    def logits(path: Path) -> Tensor:
        return torch.tensor([80.0, 0, 0, 0, 0, 0]) if path == (1,) else torch.tensor([0.0, 0.1, 0, -9, -9, -9])

    draft = grow(Scripted(logits), Budget(rows=2, depth=3, width=3), None, None)
    assert paths_of(draft) == [(1,)]


# budgets


def test_budgets_that_make_no_sense_are_refused() -> None:
    for rows, depth, width in [(0, 1, 1), (1, -1, 1), (4, 2, 0)]:
        with pytest.raises(ValueError, match="a budget needs"):
            Budget(rows, depth, width)
    with pytest.raises(ValueError, match=r"lacks the parent of its path \(0, 1\)"):
        Budget.static([(1,), (0, 1)])
    with pytest.raises(ValueError, match="lacks the parent"):
        Budget.static([()])
    with pytest.raises(ValueError, match="ranks count from 0"):
        Budget.static([(0,), (-1,)])
    with pytest.raises(ValueError, match="twice"):
        Budget.static([(0,), (0,)])
    with pytest.raises(ValueError, match="does not fit 2 rows"):
        Budget(rows=2, depth=2, shape=((0,), (0, 0)))


def test_budgets_within_a_depth() -> None:
    assert Budget.chain(5).within(3) == Budget.chain(3)
    assert Budget.chain(5).within(9) == Budget.chain(5)
    assert Budget(16, 5, 4).within(2) == Budget(16, 2, 4)
    assert Budget.static([(0,), (0, 1), (0, 1, 0)]).within(2) == Budget.static([(0,), (0, 1)])
    assert Budget.chain(5).within(0) == Budget.chain(0) == Budget(rows=1, depth=0)
    assert len(grow(Scripted(table(0)), Budget.static([(0,)]).within(0), None, None)) == 0


# broken heads


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize(
    ("budget", "sampler"),
    [
        (Budget.chain(3), None),
        (Budget.chain(3), Sampler(0.5, top_k=3, top_p=0.9)),
        (Budget(8, 3, 3), None),
        (Budget.static([(0,), (1,), (0, 2)]), None),
    ],
    ids=["chain", "sampled", "tree", "static"],
)
def test_broken_logits_draft_badly_instead_of_crashing(
    broken: float, everywhere: bool, budget: Budget, sampler: Sampler | None
) -> None:
    def logits(path: Path) -> Tensor:
        values = table(8)(path)
        values[slice(None) if everywhere else 2] = broken
        return values

    ids = torch.tensor([1, 4, 6, 8, 9, 12])
    draft = grow(Scripted(logits, ids), budget, sampler, ids)
    assert 1 <= len(draft) <= budget.rows - 1
    assert set(draft.tokens) <= set(ids.tolist())
    for q in draft.q:
        assert q is None or (bool(torch.isfinite(q).all()) and float(q.sum()) == pytest.approx(1, abs=1e-6))
