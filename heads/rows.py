"""Rows of training texts: which are drafted from, and what of its text each may attend.

Row i of a text is its position i with the target's taps there; what is drafted from it begins with token i + 2, since
token i + 1 is the root, which the target gave itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heads.judge import TrainingBatch


def drafted_from(batch: TrainingBatch) -> Tensor:
    """Bool (B, T): rows whose first drafted token is trained."""
    rows = torch.zeros_like(batch.loss_mask)
    rows[:, :-2] = batch.loss_mask[:, 2:]
    return rows


def packed(rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The chosen of ``rows`` (B, T), in order and packed to the left: their numbers (B, width), and which are there."""
    order = (~rows).int().sort(dim=1, stable=True).indices[:, :width]
    return order, rows.gather(1, order)


def take(values: Tensor, order: Tensor) -> Tensor:
    """(B, R, X) of (B, T, X) by row numbers (B, R)."""
    return values.gather(1, order[..., None].expand(-1, -1, values.shape[-1]))


def positions_of(batch: TrainingBatch, order: Tensor) -> Tensor:
    """Positions (B, R) of row numbers (B, R): each text's own, where several stand in a row."""
    return batch.positions.expand(order.shape[0], -1).gather(1, order)


def visible(batch: TrainingBatch, order: Tensor, window: int = 0) -> Tensor:
    """Bool (B, R, T): which rows of the batch a draft from each of the rows numbered ``order`` (B, R) attends.

    The row itself and those before it in its text, the last ``window`` of them where that is not 0, however deep the
    draft goes.
    """
    columns, rows = torch.arange(batch.ids.shape[1], device=order.device)[None, None], order[:, :, None]
    seen = (columns <= rows) & batch.same_text(order)
    return seen & (columns > rows - window) if window else seen
