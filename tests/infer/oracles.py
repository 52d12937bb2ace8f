"""Drafters whose worth is known beforehand: an oracle, one that is always wrong, and one in between."""

from __future__ import annotations

import copy
from typing import Self

import torch
from torch import Tensor

from heads.draft import Draft
from heads.grow import Budget, Sampler
from heads.target import Target


class Oracle:
    """Proposes what the target will say, with every ``miss``-th token of the text spoiled (0: none).

    A tree's rank-0 children are the oracle's; other children are spoiled ones, unless ``rank`` says at which
    rank the right token stands.
    """

    taps: tuple[int, ...] = ()
    module_seconds = 0.0

    def __init__(self, text: Tensor, *, lookahead: int = 5, miss: int = 0, rank: int = 0) -> None:
        self.text = text[0].tolist()  # prompt and answer
        self.lookahead, self.miss, self.rank = lookahead, miss, rank
        self.at = 0
        self.vocab = 0

    def begin(self, target: Target, ids: Tensor, taps: Tensor | None) -> None:
        """The text so far is ``ids`` (1, n+1)."""
        self.at, self.vocab = ids.shape[1], target.vocab_size

    def commit(self, taps: Tensor | None, ids: list[int]) -> None:
        """Move on."""
        self.at += len(ids)

    def fork(self) -> Self:
        """For another text, of which it knows the same."""
        other = copy.copy(self)
        other.at = 0
        return other

    def token(self, place: int) -> int:
        """What is proposed for a place of the text."""
        right = self.text[place] if place < len(self.text) else 0
        return (right + 1) % self.vocab if self.miss and place % self.miss == 0 else right

    def propose(self, budget: Budget, sampler: Sampler | None) -> Draft:
        """A chain, or a tree of the budget's shape."""
        if budget.shape is None:
            return Draft.chain([self.token(self.at + i) for i in range(min(budget.depth, budget.rows - 1))])
        tokens: list[int] = []
        parents: list[int] = []
        place: dict[tuple[int, ...], int] = {(): -1}
        for path in budget.shape:
            right = self.token(self.at + len(path) - 1)
            place[path] = len(tokens)
            tokens.append((right + path[-1] - self.rank) % self.vocab)
            parents.append(place[path[:-1]])
        return Draft(tuple(tokens), tuple(parents), (None,) * len(tokens))


class Wrong(Oracle):
    """Always one off."""

    def token(self, place: int) -> int:
        return (super().token(place) + 1) % self.vocab


def greedy_text(target: Target, ids: Tensor, new: int) -> Tensor:
    """(1, n + new) of ``model.generate``, the reference."""
    with torch.inference_mode():
        return target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
