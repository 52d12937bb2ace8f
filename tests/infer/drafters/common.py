"""What tests of model-like drafters share: models that often agree, and drafters whose state is checked as they go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

import infer
from heads.draft import Draft
from heads.grow import Budget, Sampler
from heads.target import Target
from tests.tiny import tiny_model

PROMPT = torch.tensor([[7, 3, 44, 12, 9, 30, 21, 5, 60]])
NEW = 16
BUDGETS = {
    "chain": Budget.chain(3),
    "static tree": Budget.static([(0,), (1,), (0, 0), (1, 0), (0, 1), (0, 0, 0), (1, 0, 2)]),
    "dynamic tree": Budget(rows=9, depth=4, width=3),
}


@cache
def target_of(family: str, **overrides: Any) -> Target:
    return Target(tiny_model(family, **overrides))


@cache
@torch.no_grad()
def cousin(family: str, **overrides: Any) -> Any:
    """The target of that family, but for every third token, which it hardly ever says: so it is often right."""
    model = tiny_model(family, **overrides)
    model.get_output_embeddings().weight[::3] = 0
    return model


@cache
def plain(target: Target, new: int = NEW) -> list[int]:
    """The reference text."""
    with torch.inference_mode():
        return target.model.generate(PROMPT, max_new_tokens=new, do_sample=False)[0].tolist()


def decode(target: Target, drafter: Any, budget: Budget, new: int = NEW, **settings: Any) -> infer.Generation:
    return infer.generate(target, PROMPT, draft=drafter, budget=budget, max_new_tokens=new, **settings)


class Checked:
    """Hands everything to a drafter and compares the logits it grows drafts from with a pass over the whole text.

    Args:
        whole: ids (1, n) → logits (V,) of the next token, without any cache.
    """

    def __init__(self, inner: Any, whole: Callable[[Tensor], Tensor]) -> None:
        self.inner, self.whole = inner, whole
        self.text: list[int] = []
        self.drafts: list[Draft] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def begin(self, target: Target, ids: Tensor, taps: Tensor | None) -> None:
        self.text = ids[0].tolist()
        self.inner.begin(target, ids, taps)

    def commit(self, taps: Tensor | None, ids: list[int]) -> None:
        self.text += ids
        self.inner.commit(taps, ids)

    def propose(self, budget: Budget, sampler: Sampler | None) -> Draft:
        draft = self.inner.propose(budget, sampler)
        for node in range(len(draft)):
            self._check(draft, node, sampler)
        self.drafts.append(draft)
        return draft

    def fork(self) -> Checked:
        return Checked(self.inner.fork(), self.whole)

    def after(self, tokens: Sequence[int]) -> Tensor:
        """Logits (V,) behind the text and some drafted tokens."""
        return self.whole(torch.tensor([[*self.text, *tokens]]))

    def _check(self, draft: Draft, node: int, sampler: Sampler | None) -> None:
        prefix = [draft.tokens[at] for at in draft.path(draft.parents[node])]
        logits = self.after(prefix)
        score = logits.float().log_softmax(-1)[draft.tokens[node]]
        if sampler is None:
            assert draft.q[node] is None
            assert abs(float(score) - draft.scores[node]) < 1e-4
        else:
            q = draft.q[node]
            assert q is not None and q.dtype == torch.float32
            torch.testing.assert_close(q, (logits.float() / sampler.temperature).softmax(-1), rtol=1e-4, atol=1e-6)
