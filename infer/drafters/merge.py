"""Drafts of several drafters merged into one tree under one budget, written ``a|b``.

Sampling stays exact because every node carries the law it has *given what verification looked at before it*: the
nodes above it and its elder siblings. Two children of a node that say the same token become one, and the younger
one's children go on below the elder. A younger sibling that was drawn and stayed is therefore known not to be any of
its elder siblings' tokens, and its q says so::

      a: x ~ qa ─ …                     x ~ qa                          (always there)
      b: y ~ qb ─ z        merged       ├ …, and z if y = x
                                        y ~ qb without x, only if y ≠ x ─ z

What is dropped for want of rows is dropped by place alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from heads.draft import Draft
from heads.grow import Budget, Sampler
from heads.target import Target
from infer.drafters.hybrid import Several
from infer.drafters.protocol import Drafter


class Merged(Several):
    """``a|b``: one tree of all parts' drafts; the target tries the first part's children first.

    Rows are shared in proportion to the parts' look-aheads (or to ``weights``), at least one each while they last.
    Parts that draft at no cost (their attribute ``free``) are asked first; what a part leaves of its share goes to
    those asked after it. Rows that equal tokens save stay unused. No part drafts deeper than its own look-ahead.
    A budget with ``parts`` gives each its own instead.
    ``lookahead`` is the sum of the parts', so that by default each gets a chain of its own length.

    Args:
        parts: the drafters, in the order of trial.
        names: as for :class:`~infer.drafters.hybrid.Several`.
        weights: shares of the rows; the parts' look-aheads by default.

    Raises:
        ValueError: not one positive weight a part.
    """

    def __init__(
        self,
        parts: Sequence[Drafter],
        names: Sequence[str] | None = None,
        *,
        weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__(parts, names)
        self.weights = tuple(float(part.lookahead) for part in parts) if weights is None else tuple(weights)
        if len(self.weights) != len(self.parts) or (weights is not None and min(self.weights) <= 0):
            raise ValueError(f"merging {len(self.parts)} drafters takes a positive weight for each, not {weights}")
        self.lookahead = sum(part.lookahead for part in parts)
        self._order = sorted(range(len(parts)), key=lambda at: not getattr(parts[at], "free", False))
        self._vocab_size = 0

    def begin(self, target: Target, ids: Tensor, taps: Tensor | None) -> None:
        """A new text, to each with its own taps."""
        self._vocab_size = target.vocab_size
        super().begin(target, ids, taps)

    def propose(self, budget: Budget, sampler: Sampler | None) -> Draft:
        """All parts' drafts as one tree."""
        if budget.parts:
            return merge([self._ask(at, budget, sampler) for at in range(len(self.parts))], self._vocab_size)
        drafts = [Draft.empty()] * len(self.parts)
        left = budget.rows - 1
        for asked, at in enumerate(self._order):
            behind = sum(self.weights[other] for other in self._order[asked:])
            nodes = min(left, max(1, round(left * self.weights[at] / behind))) if behind else 0
            drafts[at] = self._ask(at, part_of(budget, nodes), sampler)
            # how large a drawn tree came out may hang on what was drawn, and no other draft may hang on that
            drawn = any(q is not None for q in drafts[at].q)
            left -= nodes if drawn else len(drafts[at])
        return merge(drafts, self._vocab_size)


def part_of(budget: Budget, nodes: int) -> Budget:
    """``budget`` with ``nodes`` nodes: a static tree's first, a chain so short, or a tree of that many rows."""
    if budget.shape is not None:
        return Budget.static(budget.shape[:nodes])
    return Budget(nodes + 1, min(budget.depth, nodes), budget.width)


def merge(drafts: Sequence[Draft], vocab_size: int) -> Draft:
    """One tree of several, the first draft's children tried first, equal children made one.

    A q that lost its elder siblings' tokens is no longer normalised: verification divides by its sum.

    Args:
        drafts: their nodes' laws independent of each other.
        vocab_size: of the target.
    """
    drafts = [draft for draft in drafts if len(draft)]
    if len(drafts) < 2:
        return drafts[0] if drafts else Draft.empty()
    ids, drafts = _one_vocabulary(drafts, vocab_size)
    tokens: list[int] = []
    parents: list[int] = []
    qs: list[Tensor | None] = []
    scores: list[float] = []
    sources: list[str] = []
    children: dict[int, dict[int, int]] = {}  # node → its children by token
    for draft in drafts:
        place = {-1: -1}
        for node, token in enumerate(draft.tokens):
            parent = place[draft.parents[node]]
            siblings = children.setdefault(parent, {})
            if token not in siblings:
                q = draft.q[node]
                qs.append(None if q is None else _without(q, siblings, ids))
                siblings[token] = len(tokens)
                tokens.append(token)
                parents.append(parent)
                scores += draft.scores[node : node + 1]
                sources += draft.sources[node : node + 1]
            place[node] = siblings[token]
    return Draft(
        tuple(tokens),
        tuple(parents),
        tuple(qs),
        ids,
        scores=tuple(scores) if all(draft.scores for draft in drafts) else (),
        sources=tuple(sources) if all(draft.sources for draft in drafts) else (),
    )


def _without(q: Tensor, tokens: Sequence[int] | dict[int, int], ids: Tensor | None) -> Tensor:
    """(Vd,) ``q`` with no weight on ``tokens``, which are ids of the target."""
    named = torch.tensor(list(tokens), device=q.device, dtype=torch.long)
    if not len(named):
        return q
    if ids is None:
        return q.index_fill(0, named[named < len(q)], 0.0)
    return q.masked_fill(torch.isin(ids.to(q.device), named), 0.0)


def _one_vocabulary(drafts: Sequence[Draft], vocab_size: int) -> tuple[Tensor | None, list[Draft]]:
    """The ids that all q's are over: the drafts' own if they agree, the target's otherwise."""
    drawn = [draft for draft in drafts if any(q is not None for q in draft.q)]
    if not drawn:
        return None, list(drafts)
    ids = drawn[0].ids
    if all(_same(draft.ids, ids) for draft in drawn):
        return ids, list(drafts)
    whole = [
        tuple(None if q is None else draft.full_q(node, vocab_size) for node, q in enumerate(draft.q))
        for draft in drafts
    ]
    return None, [
        Draft(draft.tokens, draft.parents, q, None, draft.scores, draft.sources)
        for draft, q in zip(drafts, whole, strict=True)
    ]


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))
