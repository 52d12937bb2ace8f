"""Anchors: the rows of a text that a training pass drafts from, drawn anew each pass; all of them when evaluating.

A row is one position's state, and is trained where the token behind the next one is the target's own: the next token
is known when a draft begins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heads.rows import packed


def anchors_of(rows: Tensor, share: float) -> Tensor:
    """Anchors (B,) of texts with so many trained ``rows`` (B,): ``share`` of them, rounded up; known beforehand."""
    return (rows.double() * share).ceil().long()


def draw_anchors(trained: Tensor, texts: Tensor, share: float | None) -> tuple[Tensor, Tensor]:
    """The rows (B, R) to draft from, in order, and bool (B, R) which of them are there; one column at least.

    Args:
        trained: (B, T) bool.
        texts: (B, T) numbers of the texts that they belong to, as many anchors for each whatever stands beside it.
        share: of them, drawn by torch's generator; None for all.
    """
    if share is not None:
        lots = torch.rand(trained.shape).to(trained.device)[trained]
        of = texts[trained]
        counts = torch.bincount(of)
        by_text = lots.argsort()
        by_text = by_text[of[by_text].argsort(stable=True)]
        rank = torch.empty_like(of)
        rank[by_text] = torch.arange(len(of), device=of.device) - (counts.cumsum(0) - counts)[of[by_text]]
        trained = trained.masked_scatter(trained, rank < anchors_of(counts, share)[of])
    return packed(trained, max(1, int(trained.sum(1).max())))
