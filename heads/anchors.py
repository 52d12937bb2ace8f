"""Anchors: the rows of a text that a training pass drafts from, drawn anew each pass; all of them when evaluating.

A row is one position's state, and is trained where the token behind the next one is the target's own: the next token
is known when a draft begins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heads.judge import TrainingBatch


def anchors_of(rows: Tensor, share: float) -> Tensor:
    """Anchors (B,) of texts with so many trained ``rows`` (B,): ``share`` of them, rounded up; known beforehand."""
    return (rows.double() * share).ceil().long()


def drafted_from(batch: TrainingBatch) -> Tensor:
    """Bool (B, T): rows whose first drafted token is trained."""
    rows = torch.zeros_like(batch.loss_mask)
    rows[:, :-2] = batch.loss_mask[:, 2:]
    return rows


def draw_anchors(trained: Tensor, share: float | None) -> tuple[Tensor, Tensor]:
    """The rows (B, R) to draft from, in order, and bool (B, R) which of them are there; one column at least.

    Args:
        trained: (B, T) bool.
        share: of them, drawn by torch's generator; None for all.
    """
    counts = trained.sum(1)
    if share is not None:
        counts = anchors_of(counts, share)
        lots = torch.rand(trained.shape).to(trained.device).masked_fill(~trained, 2.0)
        ranks = lots.argsort(1).argsort(1)
        trained = trained & (ranks < counts[:, None])
    order = (~trained).int().sort(dim=1, stable=True).indices[:, : max(1, int(counts.max()))]
    return order, trained.gather(1, order)
