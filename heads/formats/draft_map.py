"""EAGLE-3's map of a reduced draft vocabulary: ``d2t`` holds offsets (target id = i + d2t[i]), ``t2d`` who is in it."""

from __future__ import annotations

import torch
from torch import Tensor

from heads.formats.checkpoint import Checkpoint
from heads.formats.format import FormatError
from heads.formats.settings import Settings

INTEGERS = (torch.int64, torch.int32)


def to_offsets(target_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """``d2t`` int64 (Vd,) and ``t2d`` bool (V,) of sorted target ids (Vd,)."""
    ids = target_ids.detach().cpu().long()
    member = torch.zeros(vocab_size, dtype=torch.bool)
    member[ids] = True
    return {"d2t": ids - torch.arange(ids.shape[0]), "t2d": member}


def from_offsets(
    checkpoint: Checkpoint, settings: Settings, rows: int, vocab_size: int
) -> tuple[Tensor, Tensor] | None:
    """Sorted target ids (Vd,) and which of the stored rows stands where, None for the whole vocabulary in order.

    Raises:
        FormatError: the map is missing or all zero though the vocabulary is reduced, names a token twice or one that
            the target lacks, or ``t2d`` or the config say otherwise.
    """
    path = checkpoint.path
    told = settings.whole("draft_vocab_size", rows)
    if told != rows:
        raise FormatError(f"{settings.where}: draft_vocab_size is {told} and lm_head.weight has {rows} rows")
    if "d2t" not in checkpoint.entries:
        if rows != vocab_size:
            raise FormatError(
                f"{path}: lm_head.weight has {rows} rows where the target has {vocab_size} tokens, and there is no d2t "
                "that says which they are: the map is lost"
            )
        return None
    entry = checkpoint.entries["d2t"]
    if entry.shape != (rows,) or entry.dtype not in INTEGERS:
        raise FormatError(f"{path}: d2t is {entry.dtype} of shape {entry.shape} where {rows} integers are expected")
    offsets = checkpoint.load("d2t").long()
    if rows != vocab_size and not bool(offsets.any()):
        raise FormatError(
            f"{path}: d2t is all zero, though {rows} of the target's {vocab_size} tokens are drafted: the map is lost"
        )
    ids = offsets + torch.arange(rows)
    order = ids.argsort()
    ids = ids[order]
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size or bool((ids[1:] == ids[:-1]).any()):
        raise FormatError(f"{path}: i + d2t[i] must be distinct tokens below {vocab_size}")
    _check_members(checkpoint, ids, vocab_size)
    return ids, order


def _check_members(checkpoint: Checkpoint, ids: Tensor, vocab_size: int) -> None:
    entry = checkpoint.entries.get("t2d")
    if entry is None:
        return
    if entry.shape != (vocab_size,):
        raise FormatError(f"{checkpoint.path}: t2d has {entry.shape} entries where the target has {vocab_size} tokens")
    if not torch.equal(checkpoint.load("t2d").to(torch.bool).nonzero()[:, 0], ids):
        raise FormatError(f"{checkpoint.path}: t2d and d2t name different tokens")
