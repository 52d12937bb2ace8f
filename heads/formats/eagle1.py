"""EAGLE-1 and 2: recognised and refused by name, since no kind of heads here is that layer."""

from __future__ import annotations

from typing import NoReturn

from heads.base import DraftHeads
from heads.formats.checkpoint import Checkpoint
from heads.formats.format import Choice, Format, FormatError, Request
from heads.target import Target

NAME = "eagle1"
WHY = (
    "EAGLE-1 and 2 are one layer without input norm and final norm, over the embedding and the last state, under the "
    "target's output matrix"
)


def write(heads: DraftHeads, request: Request) -> NoReturn:
    """Refuse."""
    raise FormatError(f"heads of kind {heads.config.kind} have no eagle1 form: {WHY}, and no kind of heads here is")


def recognises(checkpoint: Checkpoint) -> bool:
    """``fc`` from 2H to H above a layer that norms only behind its attention."""
    fc = checkpoint.entries.get("fc.weight")
    return (
        fc is not None
        and len(fc.shape) == 2
        and fc.shape[1] == 2 * fc.shape[0]
        and "norm.weight" not in checkpoint.entries
    )


def read(checkpoint: Checkpoint, target: Target, choice: Choice) -> NoReturn:
    """Refuse."""
    raise FormatError(f"{checkpoint.path} holds EAGLE-1 or 2 heads ({WHY}): no kind of heads here can hold them")


FORMAT = Format("EAGLE-1 and 2", write, recognises, read)
