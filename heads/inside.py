"""Heads that draft inside the verification pass: rows of their own ride along, and what they say is the next draft.

The rows stand behind nodes of the draft that is being verified (behind the root, too): wherever acceptance ends, the
rows there have read all that is committed but the token that the target adds itself::

      pass      root ─► 0 ─► 1          verified rows: as they would be alone
                 │      │    └ ▫ ▫      rows behind node 1
                 │      └ ▫ ▫
                 └ ▫ ▫ ▫                a row sees the text, its node's path, and those before it behind the same node

They cost rows of the pass as drafted tokens do, so a budget's rows are shared between both.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from heads.base import DraftHeads
from heads.draft import Draft
from heads.grow import Budget
from heads.target import Target


@dataclass(frozen=True)
class ExtraRows:
    """Rows of a pass beside those that are verified.

    Attributes:
        after: the node that each of the m rows stands behind, -1 for the root; those of one node in their order.
    """

    after: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.after)

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """Place of each row behind its node, from 0."""
        seen: dict[int, int] = {}
        places = []
        for node in self.after:
            places.append(seen.get(node, 0))
            seen[node] = places[-1] + 1
        return tuple(places)

    def behind(self, node: int) -> list[int]:
        """Numbers of the rows behind a node, in order."""
        return [row for row, other in enumerate(self.after) if other == node]

    def depths(self, draft: Draft) -> list[int]:
        """How far behind the root each row stands: its node's depth and its place."""
        return [
            (draft.depths[node] if node >= 0 else 0) + 1 + slot
            for node, slot in zip(self.after, self.slots, strict=True)
        ]

    def visibility(self, draft: Draft) -> Tensor:
        """Bool (1+n+m, 1+n+m): what rows of the pass see of each other, those of the draft first."""
        tokens = draft.visibility()
        n, m = len(tokens), len(self)
        rows = torch.zeros(n + m, n + m, dtype=torch.bool)
        rows[:n, :n] = tokens
        for row, node in enumerate(self.after):
            rows[n + row, :n] = tokens[node + 1]
            rows[n + row, [n + elder for elder in self.behind(node) if elder <= row]] = True
        return rows


class DraftsInside(DraftHeads):
    """Heads whose drafts are read off the pass that verified the draft before.

    They read tap ``num_layers`` alone, and have nothing to say before the first pass behind the prompt.
    """

    @abstractmethod
    def usual(self, depth: int) -> Budget:
        """A budget under which chains of ``depth`` tokens are drafted whatever was accepted."""

    @abstractmethod
    def reserve(self, budget: Budget) -> Budget:
        """The part of a budget that drafted tokens may take; the rest is for :meth:`extra_rows`."""

    @abstractmethod
    def extra_rows(self, draft: Draft, budget: Budget, room: int) -> ExtraRows:
        """The rows to add to the pass that verifies ``draft``.

        Args:
            budget: of the pass, the draft's rows included.
            room: positions behind the root that there are.
        """

    @abstractmethod
    def applied(self, target: Target, first: int, slots: Tensor) -> AbstractContextManager[None]:
        """What makes rows of the target's passes inside the block rows of these heads.

        Args:
            first: number of the first such row; those before it stay what they are, bit for bit.
            slots: (B, m) place of each such row behind its node.
        """

    @abstractmethod
    def read(self, state: Any, states: Tensor) -> None:
        """What a pass gave at the rows behind the last accepted node, (1, m, H); none after a pass without rows."""
