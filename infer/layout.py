"""The rows of one pass over several texts: roots, drafted nodes, rows that drafters add, and filler.

::

      text 0   root  0  1  2  │ ▫ ▫ ▫ ▫        │: from here on rows of drafters, of all texts at the same place
      text 1   root  0  ·  ·  │ ▫ ▫ ·  ·        ·: filler, seen by nothing
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from heads.draft import Draft
from heads.inside import ExtraRows


class Layout:
    """Where each row of a pass stands and what it sees.

    Args:
        drafts, extra: of each text.
        rows: of the pass; as many as it takes for None.

    Attributes:
        rows: of the pass, as many for each text.
        first: the first row that a drafter added, or would have; verified rows stand before it.
        depths: (B, rows) positions behind the root.
        seen: for each text bool (n, n), what its rows see of each other; rows behind these see themselves.
    """

    def __init__(self, drafts: Sequence[Draft], extra: Sequence[ExtraRows], rows: int | None) -> None:
        self.drafts, self.extra = drafts, extra
        self.added = max(map(len, extra))
        verified = 1 + max(map(len, drafts))
        self.rows = rows or verified + self.added
        self.first = verified if self.added else self.rows
        self.depths = torch.zeros(len(drafts), self.rows, dtype=torch.long)
        self.seen: list[Tensor] = []
        for text, (draft, more) in enumerate(zip(drafts, extra, strict=True)):
            end = self.first if draft.is_chain else 1 + len(draft)
            # filler goes on behind a chain as if it were drafted, for models that can read nothing but chains
            self.depths[text, :end] = torch.arange(end) if draft.is_chain else torch.tensor([0, *draft.depths])
            self.depths[text, self.first : self.first + len(more)] = torch.tensor(more.depths(draft), dtype=torch.long)
            self.seen.append(self._seen(draft, more))

    def ids(self, roots: Sequence[int]) -> Tensor:
        """(B, rows) tokens; roots again where there is none."""
        return torch.tensor(
            [[root, *d.tokens, *[root] * (self.rows - 1 - len(d))] for root, d in zip(roots, self.drafts, strict=True)]
        )

    def slots(self) -> Tensor:
        """(B, rows - first) places of added rows behind their nodes; 0 for filler."""
        wide = self.rows - self.first
        return torch.tensor([[*more.slots, *[0] * (wide - len(more))] for more in self.extra], dtype=torch.long)

    def _seen(self, draft: Draft, more: ExtraRows) -> Tensor:
        if not self.added:
            return torch.ones(self.rows, self.rows, dtype=torch.bool).tril() if draft.is_chain else draft.visibility()
        own, n = more.visibility(draft), 1 + len(draft)
        seen = torch.eye(self.first + len(more), dtype=torch.bool)
        seen[:n, :n], seen[self.first :, self.first :] = own[:n, :n], own[n:, n:]
        seen[self.first :, :n] = own[n:, :n]
        return seen
