"""The target's states that heads learn from, computed each step.

``train/cache.py`` is the same from disk, ``train/pool.py`` the same from other processes. All round alike, so that
a run is the same whichever is chosen::

    online   ids ─► target ─► round ─────────────────────────► batch
    cached   ids ─► target ─► round ─► file        (once)
                                        └────────────────────► batch
    workers  ids ─► a file ─► another process's target ─► round ─► a file ─► batch
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from data.pack import attention
from heads.judge import TrainingBatch, text_positions
from heads.target import Target
from train.conversations import Conversations
from train.storage import Storage

LOGIT_ROWS = 128  # positions whose logits over the whole vocabulary are held at once: small enough to be reused memory


class FeatureSource(Protocol):
    """Training batches by conversation number."""

    conversations: Conversations

    def batch(self, indices: Sequence[int]) -> TrainingBatch:
        """Right-padded batch of those conversations, on the target's device, states as they are stored."""
        ...

    def expect(self, batches: Sequence[Sequence[int]]) -> None:
        """The batches that will be asked for next, in order; a source may begin to fetch them."""
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
    storage: Storage,
    *,
    documents: Tensor | None = None,
) -> dict[str, Tensor]:
    """One pass of the target over a padded batch; what stands in padding is whatever the target made of it.

    Args:
        taps: hidden states as transformers counts them, at least one.
        ids, loss_mask: (B, T).
        documents: (B, T) numbers of the texts where a row holds several, each of which is read by itself.

    Returns:
        The columns of ``storage``, each (B, T, width). ``top`` and ``lse`` are the target's arg-max and log-sum-exp
        of its logits where it is judged (where token t+1 is the target's own), else 0.
    """
    # padding stands on the right, where no row before it can see it: without a mask attention takes its fast path
    apart, positions = (None, None) if documents is None else (attention(documents), text_positions(documents))
    out = target.forward(ids, mask=apart, positions=positions, taps=taps, hidden=True, logits_to_keep=1)
    assert out.hidden is not None and out.taps is not None
    columns = storage.encode(out.taps, out.hidden)
    columns = {name: value.clone() for name, value in columns.items()}  # no inference tensors: autograd may save them
    judged = torch.zeros_like(loss_mask)
    judged[:, :-1] = loss_mask[:, 1:]
    top = torch.zeros_like(ids, dtype=torch.int32)
    lse = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
    rows = columns["hidden"][judged].to(target.dtype)
    if len(rows):
        with torch.no_grad():
            found = [_judge(target.project(part)) for part in rows.split(LOGIT_ROWS)]
        top[judged] = torch.cat([best for best, _ in found]).int()
        lse[judged] = torch.cat([whole for _, whole in found])
    return columns | {"top": top[..., None], "lse": lse[..., None]}


def _judge(logits: Tensor) -> tuple[Tensor, Tensor]:
    wide = logits.float()
    return wide.argmax(-1), wide.logsumexp(-1)


def as_batch(
    ids: Tensor, loss_mask: Tensor, mask: Tensor, columns: Mapping[str, Tensor], storage: Storage
) -> TrainingBatch:
    """States by column, each (B, T, width), as a batch; padding is zeroed, so that nothing can depend on it."""
    taps, hidden = storage.decode(columns)
    return TrainingBatch(
        ids=ids,
        loss_mask=loss_mask,
        mask=mask,
        taps=taps.masked_fill(~mask[..., None], 0),
        hidden=hidden.masked_fill(~mask[..., None], 0),
        top=columns["top"][..., 0].long(),
        lse=columns["lse"][..., 0],
    )


class OnlineFeatures:
    """Runs the target on every batch."""

    def __init__(self, target: Target, conversations: Conversations, taps: Sequence[int], dtype: torch.dtype) -> None:
        self.target, self.conversations, self.taps = target, conversations, tuple(taps)
        self.storage = Storage(len(self.taps), target.hidden_size, dtype)

    def batch(self, indices: Sequence[int]) -> TrainingBatch:
        """See :class:`FeatureSource`."""
        ids, loss_mask, mask = (part.to(self.target.device) for part in pad_ids(self.conversations, indices))
        columns = run_target(self.target, self.taps, ids, loss_mask, self.storage)
        return as_batch(ids, loss_mask, mask, columns, self.storage)

    def expect(self, batches: Sequence[Sequence[int]]) -> None:
        """Nothing can be begun: the target is this process's own."""
