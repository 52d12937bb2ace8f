"""Matrices of a checkpoint that repeat the target's own: are they really the same?"""

from __future__ import annotations

import torch
from torch import Tensor

from heads.formats.checkpoint import Checkpoint
from heads.formats.format import FLOATS, FormatError
from heads.target import Target

EMBEDDING = "embed_tokens.weight"
CHUNK = 4096  # rows compared at a time


def differing_rows(theirs: Tensor, ours: Tensor) -> int:
    """How many rows of two (n, H) matrices differ once both are rounded to the coarser of their dtypes."""
    coarse = max(theirs.dtype, ours.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    return sum(
        int((theirs[i : i + CHUNK].to(coarse) != ours[i : i + CHUNK].detach().cpu().to(coarse)).any(1).sum())
        for i in range(0, theirs.shape[0], CHUNK)
    )


def check_embedding(checkpoint: Checkpoint, target: Target) -> None:
    """A checkpoint may carry the target's embedding; heads here read the target's own and store none.

    Raises:
        FormatError: it is another one.
    """
    entry = checkpoint.entries.get(EMBEDDING)
    if entry is None:
        return
    own = target.embedding.weight
    if entry.shape != tuple(own.shape) or entry.dtype not in FLOATS:
        raise FormatError(
            f"{checkpoint.path}: {EMBEDDING} is {entry.dtype} {entry.shape}, and {target.name} has {tuple(own.shape)}"
        )
    if wrong := differing_rows(checkpoint.load(EMBEDDING), own):
        raise FormatError(
            f"{checkpoint.path}: {EMBEDDING} differs from {target.name}'s in {wrong} of {own.shape[0]} rows: it was "
            "trained along, or is for another target; these heads read the target's own embedding"
        )
