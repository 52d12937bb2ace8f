"""What a format of another project is to this one: a writer, a reader, and what passes between them and the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from heads.base import DraftHeads
    from heads.formats.checkpoint import Checkpoint
    from heads.target import Target

ENGINES = ("vllm", "sglang")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class FormatError(ValueError):
    """Heads that a format cannot hold, or a checkpoint that cannot be read as it stands."""


@dataclass(frozen=True)
class Request:
    """What an export is asked for: an engine or any, a dtype or the heads' own, the name to record for the target."""

    engine: str | None
    dtype: torch.dtype
    target_name: str


@dataclass(frozen=True)
class Files:
    """An export before it is written.

    Attributes:
        config: of config.json.
        weights: name of the weights' file.
        tensors: as stored; none shares memory with another.
        engines: in which engines this folder is right; empty where only the format's own project reads it.
        notes: what the form leaves out without being wrong for it, for the user to know.
    """

    config: dict[str, Any]
    weights: str
    tensors: dict[str, Tensor]
    engines: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choice:
    """What an import is told beside the checkpoint: whose count its tap ids are in, and how deep to draft."""

    engine: str | None = None
    lookahead: int | None = None


@dataclass(frozen=True)
class Plan:
    """Heads to be made of a checkpoint.

    Attributes:
        kind, lookahead, taps, options: as of ``heads.kinds.make_config``.
        names: our tensor → theirs.
        also: their tensors that are accounted for without becoming ours.
        target_ids: (Vd,) sorted target ids of the draft vocabulary, None for the whole one.
        order: for our tensors named here, which of their rows stand where.
        zeros: our tensors that theirs leave out and that are zero then.
    """

    kind: str
    lookahead: int | None
    taps: tuple[int, ...]
    options: dict[str, Any]
    names: dict[str, str]
    also: frozenset[str] = frozenset()
    target_ids: Tensor | None = None
    order: dict[str, Tensor] = field(default_factory=dict)
    zeros: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Format:
    """One row of the table: ``writes`` raises :class:`FormatError` with the reason where heads have no such form."""

    what: str
    writes: Callable[[DraftHeads, Request], Files]
    recognises: Callable[[Checkpoint], bool]
    reads: Callable[[Checkpoint, Target, Choice], Plan]


def listed(names: Iterable[str], most: int = 20) -> str:
    """Names for a message; they come from a file that may be hostile, so they are cut and made printable."""
    names = sorted(names)
    shown = [name if name.isprintable() and len(name) <= 100 else f"{name[:100]!r}…" for name in names[:most]]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")


def stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor as a file holds it: on the CPU, contiguous, its own memory."""
    return tensor.detach().to("cpu", dtype, copy=True).contiguous()


def engine_of(request: Request, engines: Iterable[str], format_name: str) -> None:
    """Refuse an engine that does not read the format.

    Raises:
        FormatError: names the engines that do.
    """
    engines = list(engines)
    if request.engine is not None and request.engine not in engines:
        raise FormatError(
            f"{request.engine} does not read the {format_name} format (read by {', '.join(engines)}): "
            "export to another format, or for another engine"
        )


def only_kind(heads: DraftHeads, kind: str, format_name: str, reason: str) -> None:
    """Refuse heads of another kind.

    Raises:
        FormatError: with the reason why this kind has no such form; or they draft in a window, which no form can say.
    """
    if heads.config.kind != kind:
        raise FormatError(f"heads of kind {heads.config.kind} have no {format_name} form: {reason}")
    if window := heads.config.options.get("window"):
        raise FormatError(
            f"these heads attend the last {window} tokens, which has no place in the {format_name} form: engines would "
            "attend the whole text, as they were not trained to"
        )
