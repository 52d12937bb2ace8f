"""The folder of a prepared dataset: whose it is, and how a new one takes its place without anything being lost."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

PROVENANCE, REPORT = "provenance.json", "report.json"
SPLITS = ("train", "heldout")


def beside(out: Path) -> Path:
    """A new hidden name in the same folder, so that renaming from or to it is atomic."""
    return out.with_name(f".{out.name}-{uuid.uuid4().hex[:8]}")


def _ours(name: str) -> bool:
    """Whether preparing (or the datasets library, caching beside its data) writes a file of this name."""
    head, _, rest = name.partition(os.sep)
    arrow = rest.startswith(("data-", "cache-")) and rest.endswith(".arrow")
    return name in (PROVENANCE, REPORT) or (head in SPLITS and (arrow or rest in ("state.json", "dataset_info.json")))


def claimed(out: Path) -> dict[str, Any] | None:
    """The provenance of the prepared dataset that stands at ``out``; None when nothing does.

    Raises:
        ValueError: ``out`` is a file, holds a file that preparing did not write, or lacks its provenance.
    """
    if not out.exists():
        return None
    if not out.is_dir():
        raise ValueError(f"{out} is a file: name a folder for the prepared data")
    names = {str(path.relative_to(out)) for path in out.rglob("*") if not path.is_dir()}
    foreign = sorted(name for name in names if not _ours(name))
    if foreign:
        raise ValueError(f"{out} holds {foreign[0]}, which preparing did not write: name another folder")
    if names and PROVENANCE not in names:
        raise ValueError(f"{out} has no {PROVENANCE}, so it was not made by preparing: name another folder")
    return json.loads((out / PROVENANCE).read_text(encoding="utf-8")) if names else None


def place(partial: Path, out: Path) -> None:
    """Rename a finished folder into place; an older one (checked by :func:`claimed`) goes out of its way first."""
    if not out.exists():
        partial.rename(out)
        return
    old = beside(out)
    out.rename(old)
    partial.rename(out)
    shutil.rmtree(old)
