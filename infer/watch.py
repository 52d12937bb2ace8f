"""A drafter looked over the shoulder: which child, at each depth, the target took.

From these counts :func:`infer.lookahead.static_tree` builds the tree that pays most. What became of a draft is read
from the finished text, so the last round counts as far as the text goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from heads.draft import Draft
from heads.grow import Budget, Sampler
from heads.target import Target
from infer.drafters import Drafter


@dataclass
class RankCounts:
    """How often a child of some rank was on offer at some depth, and how often the target took it.

    ``offered[d][r]`` counts rounds whose accepted path had reached depth ``d`` and had a child of rank ``r`` there.
    Counts of several runs are added before any ratio is formed.
    """

    offered: list[list[int]] = field(default_factory=list)
    taken: list[list[int]] = field(default_factory=list)

    def count(self, draft: Draft, text: Sequence[int]) -> None:
        """Follow ``draft`` along the tokens ``text`` that came after its root."""
        node = -1
        for depth, token in enumerate(text):
            children = draft.children(node)
            if not children:
                return
            self._room(depth, len(children))
            node = -1
            for rank, child in enumerate(children):
                self.offered[depth][rank] += 1
                if draft.tokens[child] == token:
                    self.taken[depth][rank] += 1
                    node = child
            if node < 0:
                return

    def _room(self, depth: int, ranks: int) -> None:
        for table in (self.offered, self.taken):
            while len(table) <= depth:
                table.append([])
            table[depth] += [0] * (ranks - len(table[depth]))

    def add(self, other: RankCounts) -> None:
        """Take another run's counts in."""
        for depth, (offered, taken) in enumerate(zip(other.offered, other.taken, strict=True)):
            self._room(depth, len(offered))
            for rank in range(len(offered)):
                self.offered[depth][rank] += offered[rank]
                self.taken[depth][rank] += taken[rank]

    def acceptance(self) -> tuple[tuple[float, ...], ...]:
        """``[depth][rank]`` -> P(taken | offered), 0 where never offered."""
        return tuple(
            tuple(t / o if o else 0.0 for t, o in zip(taken, offered, strict=True))
            for taken, offered in zip(self.taken, self.offered, strict=True)
        )


class Watched:
    """A drafter that hands everything to ``inner`` and remembers each draft with the place it was made at."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.drafts: list[tuple[int, Draft]] = []
        self.length = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def begin(self, target: Target, ids: Tensor, taps: Tensor | None) -> None:
        """See :class:`infer.drafters.Drafter`."""
        self.drafts, self.length = [], ids.shape[1]
        self.inner.begin(target, ids, taps)

    def propose(self, budget: Budget, sampler: Sampler | None) -> Draft:
        """See :class:`infer.drafters.Drafter`."""
        draft = self.inner.propose(budget, sampler)
        self.drafts.append((self.length, draft))
        return draft

    def commit(self, taps: Tensor | None, ids: list[int]) -> None:
        """See :class:`infer.drafters.Drafter`."""
        self.length += len(ids)
        self.inner.commit(taps, ids)

    def fork(self) -> Watched:
        """Watches another text, apart from this one."""
        return Watched(self.inner.fork())

    def latest(self) -> Draft | None:
        """The draft being verified, None before the first."""
        return self.drafts[-1][1] if self.drafts else None

    def ranks(self, sequence: Sequence[int]) -> RankCounts:
        """Counts over the generation that ended in ``sequence`` (prompt included)."""
        counts = RankCounts()
        for at, draft in self.drafts:
            counts.count(draft, sequence[at:])
        return counts
