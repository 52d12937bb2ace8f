"""Other projects' checkpoints: heads out of this project and into it. A format is one file here and one row below."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from heads.base import DraftHeads
from heads.formats import dflash, dspark, eagle1, eagle3, economize, medusa, speculators
from heads.formats.assemble import assemble
from heads.formats.folder import new_folder, open_checkpoint, write_folder
from heads.formats.format import ENGINES, FLOATS, Choice, Format, FormatError, Request, listed
from heads.formats.settings import Settings
from heads.target import Target

# also the order in which a checkpoint is recognised: the particular before the general
FORMATS: dict[str, Format] = {
    speculators.NAME: speculators.FORMAT,
    economize.NAME: economize.FORMAT,
    medusa.NAME: medusa.FORMAT,
    dspark.NAME: dspark.FORMAT,
    dflash.NAME: dflash.FORMAT,
    eagle3.NAME: eagle3.FORMAT,
    eagle1.NAME: eagle1.FORMAT,
}
RECORDED = (
    "base_model_name_or_path",
    "_name_or_path",
    "base_model",
)  # where configs name the target they were made for


@dataclass(frozen=True)
class Exported:
    """What an export wrote: format, folder, files, dtype, engines it is right in, the target's name, notes."""

    format: str
    folder: str
    files: tuple[str, ...]
    tensors: int
    dtype: str
    engines: tuple[str, ...]
    target: str
    notes: tuple[str, ...] = ()


def export_heads(
    heads: DraftHeads,
    format_name: str,
    folder: str | Path,
    *,
    engine: str | None = None,
    dtype: torch.dtype | None = None,
    target_name: str | None = None,
) -> Exported:
    """Write heads as another project stores them.

    Args:
        format_name: a row of ``FORMATS``.
        folder: a new one; written whole or not at all.
        engine: vllm or sglang, where the folder cannot be right in both.
        dtype: of the weights; the heads' own by default.
        target_name: recorded as the target's; the name that the heads know by default.

    Raises:
        FormatError: the heads have no such form, with the reason; or there is no such format or engine; or a weight is
            not finite in the dtype.
        OSError: the folder holds something, or the disk refused.
    """
    if format_name not in FORMATS:
        raise FormatError(f"unknown format {format_name!r} (known: {', '.join(FORMATS)})")
    if engine is not None and engine not in ENGINES:
        raise FormatError(f"unknown engine {engine!r} (known: {', '.join(ENGINES)})")
    if heads.config.lora is not None:
        raise FormatError("these heads have an adapter on them, which no format holds: merge it first (heads.tuned)")
    dtype = dtype or next(heads.parameters()).dtype
    if dtype not in FLOATS:
        raise FormatError(f"weights cannot be stored as {dtype}")
    name = target_name or heads.config.target.name
    files = FORMATS[format_name].writes(heads, Request(engine, dtype, name))
    if odd := [key for key, tensor in files.tensors.items() if not bool(tensor.isfinite().all())]:
        raise FormatError(
            f"{listed(odd)} would hold numbers that are not finite in {dtype}, with which nothing is drafted: train "
            "these heads again, or export in a wider dtype"
        )
    write_folder(Path(folder), files.config, files.weights, files.tensors)
    return Exported(
        format=format_name,
        folder=str(folder),
        files=("config.json", files.weights),
        tensors=len(files.tensors),
        dtype=str(dtype).removeprefix("torch."),
        engines=files.engines,
        target=name,
        notes=files.notes,
    )


@dataclass(frozen=True)
class Imported:
    """What an import read: format, kind, settings, dtype, numbers trained, and the target that the checkpoint names."""

    format: str
    heads: DraftHeads
    recorded_target: str | None


def read_heads(
    path: str | Path, target: Target, *, engine: str | None = None, lookahead: int | None = None
) -> Imported:
    """Heads of a checkpoint that another project wrote.

    Args:
        path: its folder, or its weights' file (a pickle is read only so, and only as tensors).
        target: the model it was trained on.
        engine: for which engine it was made, where its config names layers.
        lookahead: how deep to draft; what the checkpoint says, or the kind's default.

    Raises:
        FormatError: it is of no known format, broken, or does what no kind of heads here can.
    """
    if engine is not None and engine not in ENGINES:
        raise FormatError(f"unknown engine {engine!r} (known: {', '.join(ENGINES)})")
    checkpoint = open_checkpoint(path)
    found = [name for name, form in FORMATS.items() if form.recognises(checkpoint)]
    if not found:
        raise FormatError(
            f"{checkpoint.path} is of none of the formats {', '.join(FORMATS)} (it holds {listed(checkpoint.entries)})"
        )
    plan = FORMATS[found[0]].reads(checkpoint, target, Choice(engine, lookahead))
    return Imported(found[0], assemble(checkpoint, target, plan), recorded_target(checkpoint.config, checkpoint.path))


def import_heads(path: str | Path, target: Target, folder: str | Path, **options: Any) -> Imported:
    """As :func:`read_heads`, and save the heads into a new folder.

    Raises:
        FileExistsError: the folder is there and not empty.
    """
    with new_folder(Path(folder)) as partial:
        imported = read_heads(path, target, **options)
        imported.heads.save_pretrained(partial)
    return imported


def recorded_target(config: dict[str, Any], path: Path) -> str | None:
    """The target that a checkpoint's configuration names."""
    settings = Settings.of(config, path)
    verifier = settings.part("speculators_config").part("verifier").text("name_or_path", "")
    return verifier or next((name for key in RECORDED if (name := settings.text(key, ""))), None)


__all__ = [
    "ENGINES",
    "FORMATS",
    "Exported",
    "FormatError",
    "Imported",
    "export_heads",
    "import_heads",
    "read_heads",
    "recorded_target",
]
