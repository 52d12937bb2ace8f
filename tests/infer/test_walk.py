"""A walk along a text gives, for every budget, the very rounds that decoding with it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.draft import Draft
from heads.grow import Budget
from heads.target import Target
from infer.drafters import Drafter, HeadsDrafter, NoDrafter
from infer.drafters.draft_model import DraftModelDrafter
from infer.drafters.lookup import LookupDrafter
from infer.evaluate import Question, Settings
from infer.generate import generate
from infer.walk import Walk, walk
from tests.heads.small import random_ids, small_heads, small_target

TREE, CHAIN, TOKENS = Budget(rows=24, depth=3, width=5), 3, 40


def heads_of(kind: str) -> Callable[[Target], Drafter]:
    return lambda target: HeadsDrafter(small_heads(kind=kind, target=target, lookahead=3, draft_vocab=30))


DRAFTERS: dict[str, Callable[[Target], Drafter]] = {
    "eagle": heads_of("eagle"),
    "medusa": heads_of("medusa"),
    "block": heads_of("block"),
    "lookup": lambda target: LookupDrafter(1),
    "a model": lambda target: DraftModelDrafter(small_target("llama", layers=2)),
    "the target": DraftModelDrafter,
}


def question(seed: int = 1) -> Question:
    """Its prompt says one thing three times, so that a lookup has something to find from the start."""
    return Question("one", "all", random_ids(5, seed=seed, vocab=12).repeat(1, 3))


def told(target: Target, drafter: Drafter, asked: Question, chain: int = CHAIN, tree: Budget = TREE) -> Walk:
    return walk(target, drafter, asked, Settings(TOKENS), chain=chain, tree=tree)


def really(target: Target, drafter: Drafter, asked: Question, budget: Budget) -> list[tuple[int, int, bool]]:
    """Accepted, emitted and looped of each round."""
    out = generate(target, asked.ids, drafter.fork(), budget=budget, max_new_tokens=TOKENS, do_sample=False)
    return [(r.accepted, r.emitted, r.looped) for r in out.stats.log]


def log(stats: Any) -> list[tuple[int, int, bool]]:
    return [(r.accepted, r.emitted, r.looped) for r in stats.log]


@pytest.mark.parametrize("name", DRAFTERS)
@torch.no_grad()
def test_every_budget_is_what_decoding_does(name: str) -> None:
    target = small_target(layers=4)
    drafter, asked = DRAFTERS[name](target), question()
    walked, right = told(target, drafter, asked), 0
    for depth in range(CHAIN + 1):
        assert log(walked.by_chain(depth)) == really(target, drafter, asked, Budget.chain(depth))
    for rows in (2, 3, 5, 8, 13, 24):
        decoded = really(target, drafter, asked, Budget(rows=rows, depth=3, width=5))
        assert log(walked.by_tree(rows)) == decoded
        right += sum(accepted for accepted, _, _ in decoded)
    assert right, "something was accepted, or nothing was shown"


class Late:
    """A drafter that is told of each row's taps one place too late."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.taps, self.lookahead, self.module_seconds = inner, inner.taps, inner.lookahead, 0.0
        self.before: Tensor | None = None

    def begin(self, target: Target, ids: Tensor, taps: Tensor | None) -> None:
        assert taps is not None
        self.inner.begin(target, ids, taps.roll(1, 1))
        self.before = taps[:, -1:]

    def propose(self, budget: Budget, sampler: Any) -> Draft:
        return self.inner.propose(budget, sampler)

    def commit(self, taps: Tensor | None, ids: list[int]) -> None:
        self.inner.commit(self.before, ids)
        self.before = taps

    def fork(self) -> Late:
        return Late(self.inner.fork())


@torch.no_grad()
def test_taps_of_another_row_would_show() -> None:
    target = small_target(layers=4)
    drafter, asked = DRAFTERS["eagle"](target), [question(seed) for seed in range(1, 7)]
    wrong = [log(told(target, Late(drafter), one).by_tree(24)) for one in asked]
    assert wrong != [really(target, drafter, one, TREE) for one in asked]


def test_the_target_as_its_own_draft_is_always_right() -> None:
    target = small_target(layers=4)
    walked = told(target, DraftModelDrafter(target), question())
    assert [place.chain for place in walked.places[:-3]] == [3] * (TOKENS - 4)
    assert [r.accepted for r in walked.by_chain(2).log][:-1] == [2] * (len(walked.by_chain(2).log) - 1)
    assert log(told(target, NoDrafter(), question()).by_chain(0)) == [(0, 1, False)] * (TOKENS - 1)


def test_what_cannot_be_told_is_refused() -> None:
    target = small_target(layers=4)
    walked = told(target, NoDrafter(), question(), chain=2, tree=Budget(rows=4, depth=2, width=2))
    with pytest.raises(ValueError, match="chains of 2 were drafted: a depth of 3"):
        walked.by_chain(3)
    with pytest.raises(ValueError, match="trees of 4 rows were drafted: 5"):
        walked.by_tree(5)
    with pytest.raises(ValueError, match="nested in greedy decoding"):
        walk(target, NoDrafter(), question(), Settings(8, temperature=1.0), chain=1, tree=TREE)
    with pytest.raises(ValueError, match="trees by confidence, and nowhere else"):
        told(target, NoDrafter(), question(), tree=Budget.static([(0,)]))

    class Silent(LookupDrafter):
        def propose(self, budget: Budget, sampler: Any) -> Draft:
            return Draft.chain([1], [None])

        def fork(self) -> Silent:
            return self

    with pytest.raises(ValueError, match="gives its nodes no probabilities"):
        told(target, Silent(), question())


def test_walks_are_of_texts_that_end_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer of one token has no round."""
    target = small_target(layers=4)
    one = walk(target, LookupDrafter(), question(), Settings(1), chain=CHAIN, tree=TREE)
    assert one.by_chain(3).log == [] and len(one.output) == 1 and one.places == ()
