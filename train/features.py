"""The target's states that heads learn from, computed each step.

``train/cache.py`` is the same from disk. Both round to one storage dtype, so that a run is the same whichever is
chosen::

    online   ids ─► target ─► round ─────────────► batch
    cached   ids ─► target ─► round ─► file        (once)
                                        └────────► batch
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from data.pack import attention
from heads.judge import TrainingBatch, text_positions
from heads.target import Target
from train.conversations import Conversations

LOGIT_ROWS = 128  # positions whose logits over the whole vocabulary are held at once: small enough to be reused memory


@dataclass
class States:
    """What the target makes of a batch.

    Attributes:
        values: (B, T, (taps + 1)·H) in the storage dtype: taps side by side, then the post-norm hidden state.
        top: (B, T) int32, the target's arg-max where it is judged (where token t+1 is the target's own), else 0.
        lse: (B, T) float32, log-sum-exp of the target's logits there, else 0.
    """

    values: Tensor
    top: Tensor
    lse: Tensor


class FeatureSource(Protocol):
    """Training batches by conversation number."""

    conversations: Conversations

    def batch(self, indices: Sequence[int]) -> TrainingBatch:
        """Right-padded batch of those conversations, on the target's device, states in the storage dtype."""
        ...


def pad_ids(conversations: Conversations, indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """ids, loss_mask and mask, each (B, T), padded on the right with id 0 and False."""
    width = int(max(conversations.lengths[i] for i in indices))
    ids = torch.zeros(len(indices), width, dtype=torch.int64)
    loss_mask, mask = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
    for row, index in enumerate(indices):
        length = int(conversations.lengths[index])
        ids[row, :length] = conversations.ids(index)
        loss_mask[row, :length] = conversations.loss_mask(index)
        mask[row, :length] = True
    return ids, loss_mask, mask


def run_target(
    target: Target,
    taps: Sequence[int],
    ids: Tensor,
    loss_mask: Tensor,
    mask: Tensor,
    dtype: torch.dtype,
    *,
    documents: Tensor | None = None,
) -> States:
    """One pass of the target over a padded batch; what stands in padding is whatever the target made of it.

    Args:
        documents: (B, T) numbers of the texts where a row holds several, each of which is read by itself.
    """
    # padding stands on the right, where no row before it can see it: without a mask attention takes its fast path
    apart, positions = (None, None) if documents is None else (attention(documents), text_positions(documents))
    out = target.forward(ids, mask=apart, positions=positions, taps=taps, hidden=True, logits_to_keep=1)
    assert out.hidden is not None
    states = out.hidden if out.taps is None else torch.cat([out.taps, out.hidden], -1)
    values = states.to(dtype).clone()  # the clone is no inference tensor, so autograd may save it
    judged = torch.zeros_like(loss_mask)
    judged[:, :-1] = loss_mask[:, 1:]
    top = torch.zeros_like(ids, dtype=torch.int32)
    lse = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
    rows = values[..., -target.hidden_size :][judged].to(target.dtype)
    if len(rows):
        with torch.no_grad():
            found = [_judge(target.project(part)) for part in rows.split(LOGIT_ROWS)]
        top[judged] = torch.cat([best for best, _ in found]).int()
        lse[judged] = torch.cat([whole for _, whole in found])
    return States(values, top, lse)


def _judge(logits: Tensor) -> tuple[Tensor, Tensor]:
    wide = logits.float()
    return wide.argmax(-1), wide.logsumexp(-1)


def as_batch(ids: Tensor, loss_mask: Tensor, mask: Tensor, states: States, hidden_size: int) -> TrainingBatch:
    """Split states at the last ``hidden_size`` columns; padding is zeroed, so that nothing can depend on it."""
    values = states.values * mask[..., None]
    return TrainingBatch(
        ids=ids,
        loss_mask=loss_mask,
        mask=mask,
        taps=values[..., :-hidden_size],
        hidden=values[..., -hidden_size:],
        top=states.top.long(),
        lse=states.lse,
    )


class OnlineFeatures:
    """Runs the target on every batch."""

    def __init__(self, target: Target, conversations: Conversations, taps: Sequence[int], dtype: torch.dtype) -> None:
        self.target, self.conversations, self.taps, self.dtype = target, conversations, tuple(taps), dtype

    def batch(self, indices: Sequence[int]) -> TrainingBatch:
        """See :class:`FeatureSource`."""
        ids, loss_mask, mask = (part.to(self.target.device) for part in pad_ids(self.conversations, indices))
        states = run_target(self.target, self.taps, ids, loss_mask, mask, self.dtype)
        return as_batch(ids, loss_mask, mask, states, self.target.hidden_size)
