"""A draft: the tokens one round proposes, as a tree that hangs from the last committed token.

A chain is a tree of width 1. Verification runs the target once over ``[root, node 0, node 1, …]``::

      root ──► 0 ──► 2          tokens  (t0, t1, t2, t3)      depths (1, 1, 2, 2)
        └────► 1 ──► 3          parents (-1, -1, 0, 1)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draft:
    """One row's proposal.

    Attributes:
        tokens: target ids of the n nodes; the root (the last committed token) is not among them.
        parents: index of each node's parent, -1 for the root. Parents stand before their children, siblings in
            the order in which verification tries them.
        q: for each node the float32 distribution (Vd,) it was *sampled* from, or None where it was chosen (then
            its q is one-hot and verification may not use anything else: arXiv 2211.17192). In a tree it is the
            distribution *given* the elder siblings; where that was had by taking entries out, it need not sum to 1.
        ids: (Vd,) target ids of q's entries, or None when q covers the whole vocabulary.
        scores: the drafter's log-probability of each node given its parent; empty where a drafter has none.
        sources: which of several drafters each node came from; empty when all came from one.
        trust: how likely the drafter said each node of a chain is to be accepted once its parent is, before it drafted
            it; empty where it cannot tell.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    q: tuple[Tensor | None, ...]
    ids: Tensor | None = None
    scores: tuple[float, ...] = ()
    sources: tuple[str, ...] = ()
    trust: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.parents) == len(self.q):
            raise ValueError(
                "a draft needs as many parents and q as tokens, "
                f"not {len(self.parents)}, {len(self.q)}, {len(self.tokens)}"
            )
        for name in ("scores", "sources", "trust"):
            given = len(getattr(self, name))
            if given not in (0, len(self.tokens)):
                raise ValueError(f"a draft needs as many {name} as tokens, or none: {given}, {len(self.tokens)}")
        if any(not -1 <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError(
                f"each node's parent must stand before it (or be -1, the root): parents are {self.parents}"
            )

    @classmethod
    def empty(cls) -> Draft:
        """Nothing proposed: the round is a plain decoding step."""
        return cls((), (), ())

    @classmethod
    def chain(
        cls,
        tokens: Sequence[int],
        q: Sequence[Tensor | None] | None = None,
        ids: Tensor | None = None,
        scores: Sequence[float] = (),
    ) -> Draft:
        """A draft of width 1; without ``q`` its tokens count as chosen."""
        n = len(tokens)
        return cls(tuple(tokens), tuple(range(-1, n - 1)), (None,) * n if q is None else tuple(q), ids, tuple(scores))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether every node hangs from the one before it."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; the root's children have depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def _children(self) -> dict[int, list[int]]:
        table: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            table.setdefault(parent, []).append(node)
        return table

    def children(self, node: int) -> list[int]:
        """Children of ``node`` (-1: of the root), in the order of trial."""
        return self._children.get(node, [])

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to ``node``; empty for -1."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def visibility(self) -> Tensor:
        """Bool (n+1, n+1): which rows of the pass (row 0 the root, row 1+i node i) each row attends.

        A row sees its ancestors and itself, never a sibling or a cousin.
        """
        n = len(self)
        if self.is_chain:
            return torch.ones(n + 1, n + 1, dtype=torch.bool).tril()
        rows = torch.zeros(n + 1, n + 1, dtype=torch.bool)
        rows[0, 0] = True
        for node, parent in enumerate(self.parents):
            rows[node + 1] = rows[parent + 1]
            rows[node + 1, node + 1] = True
        return rows

    def full_q(self, node: int, vocab_size: int) -> Tensor:
        """Float32 (V,) ``q`` of a node, over the target's vocabulary; one-hot when chosen.

        Raises:
            ValueError: it is over more tokens than the target has, or not over those that ``ids`` names.
        """
        q = self.q[node]
        if q is not None and (q.shape[-1] > vocab_size if self.ids is None else q.shape != self.ids.shape):
            over = f"{vocab_size} tokens of the target" if self.ids is None else f"{len(self.ids)} ids of the draft"
            raise ValueError(f"a drafted token's q has {q.shape[-1]} entries for {over}")
        full = torch.zeros(vocab_size, device=None if q is None else q.device)
        if q is None:
            full[self.tokens[node]] = 1.0
        elif self.ids is None:
            full[: q.shape[-1]] = q
        else:
            full[self.ids] = q
        return full

    def shorten(self, depth: int | None = None, nodes: int | None = None) -> Draft:
        """The draft without nodes deeper than ``depth`` and without all but the first ``nodes`` of the rest.

        Dropping by place alone keeps sampling exact; what was sampled may not be dropped by what it turned out to be.
        """
        kept = [i for i in range(len(self)) if depth is None or self.depths[i] <= depth][:nodes]
        if len(kept) == len(self):
            return self
        new = {old: place for place, old in enumerate(kept)} | {-1: -1}
        return Draft(
            tuple(self.tokens[i] for i in kept),
            tuple(new[self.parents[i]] for i in kept),
            tuple(self.q[i] for i in kept),
            self.ids,
            tuple(self.scores[i] for i in kept) if self.scores else (),
            tuple(self.sources[i] for i in kept) if self.sources else (),
            tuple(self.trust[i] for i in kept) if self.trust else (),
        )
