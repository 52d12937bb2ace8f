"""What ties the tokens of a block together, and what tells how far to trust them (DSpark, arXiv 2607.05147)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Markov(nn.Module):
    """A bias on a token's logits by the token before it, of low rank: W1[before] · W2.

    Args:
        vocab: ids that may stand before, all of the target's.
        rows: entries of the draft vocabulary.
        rank: width of a token's code.
    """

    def __init__(self, vocab: int, rows: int, rank: int) -> None:
        super().__init__()
        self.w1 = nn.Embedding(vocab, rank)
        self.w2 = nn.Linear(rank, rows, bias=False)

    def initialize(self) -> None:
        """Codes of length 1 that hardly meet, and no bias yet: tokens start to differ as W2 learns."""
        nn.init.normal_(self.w1.weight, std=self.w1.embedding_dim**-0.5)
        nn.init.zeros_(self.w2.weight)

    def code(self, before: Tensor) -> Tensor:
        """W1[before], (…, rank) of ids (…)."""
        return self.w1(before)

    def forward(self, before: Tensor) -> Tensor:
        """Bias (…, rows) behind ids (…)."""
        return self.w2(self.code(before))


class Confidence(nn.Module):
    """w · [h; W1[before]]: the logit of how likely a slot's token is to be accepted, whichever it will be."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1, bias=False)

    def forward(self, hidden: Tensor, code: Tensor | None) -> Tensor:
        """Logits (n,) of hidden (n, H) and codes (n, rank), None where there is no bias."""
        seen = hidden if code is None else torch.cat([hidden, code.to(hidden.dtype)], -1)
        return self.proj(seen)[..., 0]
