"""Several conversations in a row of a batch, none of which knows of another (``train.packing``).

Rows are as long as the longest conversation of the batch, and conversations go into them by best fit, so that hardly
anything is padding however lengths vary::

    padded   aaaaaaaaaa        packed   aaaaaaaaaa
             bbbbbb....                 bbbbbbdddd
             cccccc....                 cccccceee.
             dddd......
             eee.......

Attention, positions and the tokens that heads draft stay within a conversation, in the heads and, where states are
computed online, in the target too; cached states are simply laid out anew. The loss is the sum of what the
conversations have alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from data.pack import pack, plan
from heads.judge import TrainingBatch
from heads.masks import BOOL_MASKS
from heads.target import Target
from train.conversations import Conversations
from train.features import FeatureSource, OnlineFeatures, as_batch, run_target


def pack_batch(batch: TrainingBatch) -> TrainingBatch:
    """A padded batch laid out anew."""
    lengths = batch.mask.sum(1).tolist()
    rows = plan(lengths, max(lengths))
    shape = (len(rows), max(lengths))
    made = {name: value.new_zeros(*shape, *value.shape[2:]) for name, value in vars(batch).items() if value is not None}
    documents = torch.zeros(shape, dtype=torch.int64, device=batch.ids.device)
    for row, texts in enumerate(rows):
        at = 0
        for number, text in enumerate(texts, 1):
            there = slice(at, at + lengths[text])
            for name, value in made.items():
                value[row, there] = getattr(batch, name)[text, : lengths[text]]
            documents[row, there] = number
            at = there.stop
    return _marked(TrainingBatch(**made, documents=documents))


def _marked(batch: TrainingBatch) -> TrainingBatch:
    """Nothing can draft a text's first two tokens: without their marks no state of the text before tries."""
    batch.loss_mask &= batch.positions >= 2
    return batch


class Packed:
    """A source whose batches are packed after they were made."""

    def __init__(self, inner: FeatureSource) -> None:
        self.inner, self.conversations = inner, inner.conversations

    def batch(self, indices: Sequence[int]) -> TrainingBatch:
        """Packed batch of those conversations."""
        return pack_batch(self.inner.batch(indices))

    def expect(self, batches: Sequence[Sequence[int]]) -> None:
        """See :class:`train.features.FeatureSource`."""
        self.inner.expect(batches)


class PackedOnline(OnlineFeatures):
    """Runs the target on packed rows.

    Raises:
        ValueError: the target's attention takes no mask that keeps conversations apart, or goes by places.
    """

    def __init__(self, target: Target, conversations: Conversations, taps: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__(target, conversations, taps, dtype)
        check_packable(target)

    def batch(self, indices: Sequence[int]) -> TrainingBatch:
        """Packed batch of those conversations."""
        rows = [(self.conversations.ids(i), self.conversations.loss_mask(i)) for i in indices]
        blocks = list(pack(rows, max(len(ids) for ids, _ in rows)))  # type: ignore[arg-type]

        def stacked(name: str) -> Tensor:
            return torch.stack([getattr(block, name) for block in blocks]).to(self.target.device)

        ids, documents, positions = stacked("ids"), stacked("documents"), stacked("positions")
        loss_mask = stacked("loss_mask") & (positions >= 2)
        columns = run_target(self.target, self.taps, ids, loss_mask, self.storage, documents=documents)
        batch = as_batch(ids, loss_mask, documents > 0, columns, self.storage)
        batch.documents = documents
        return batch


def check_packable(target: Target) -> None:
    """Refuse targets that would let conversations of a row see each other.

    Raises:
        ValueError: names what of the target it is.
    """
    advice = "set train.packing to false, or data.features to cached"
    if target.by_place:
        raise ValueError(f"{target.name} cannot read packed rows, because its {target.by_place} go by places: {advice}")
    others = set(target.layer_types) - {"full_attention", "sliding_attention"}
    if others:
        raise ValueError(f"{target.name} cannot read packed rows: layers of type {', '.join(sorted(others))}; {advice}")
    kernel = target.config._attn_implementation
    if kernel not in (*BOOL_MASKS, "eager"):
        raise ValueError(f"{target.name} cannot read packed rows with attention {kernel!r}: {advice}")
