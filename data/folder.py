"""The folder of a prepared dataset: whose it is, how a new one is made beside it, and how it takes its place.

    OUT                     the dataset, as it was before until the new one is whole
    .OUT.partial-KEY/       a run's parts, which a stopped run leaves for the next one with the same key
    .OUT.old                the earlier dataset, for the moment in which the new one takes its place

A file that preparing did not write is never deleted, and makes its folder untouchable.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from data.files import read_record

PROVENANCE, REPORT = "provenance.json", "report.json"
SPLITS = ("train", "heldout")
LOCK, WHOLE = "lock", "whole"
_PART = re.compile(r"part-\d+\.(arrow|json)(\.tmp)?")

_fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None
"""Locks; elsewhere two runs at once are not told apart."""


def _is_dataset_file(name: str) -> bool:
    """Whether preparing (or the datasets library, caching beside its data) writes a file of this name."""
    head, _, rest = name.partition(os.sep)
    arrow = rest.startswith(("data-", "cache-")) and rest.endswith(".arrow")
    return name in (PROVENANCE, REPORT) or (head in SPLITS and (arrow or rest in ("state.json", "dataset_info.json")))


def _is_work_file(name: str) -> bool:
    head, _, rest = name.partition(os.sep)
    return name == LOCK or bool(_PART.fullmatch(name)) or (head == WHOLE and _is_dataset_file(rest))


def _names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def claimed(out: Path) -> dict[str, Any] | None:
    """The provenance of the prepared dataset that stands at ``out``; None when nothing does.

    Raises:
        ValueError: ``out`` is a file, holds a file that preparing did not write, or lacks its provenance or has a
            damaged one.
    """
    old = _old(out)
    if old.is_dir() and not out.exists():
        old.rename(out)  # stopped between two renamings
    if not out.exists():
        return None
    if not out.is_dir():
        raise ValueError(f"{out} is a file: name a folder for the prepared data")
    foreign = _foreign(out)
    if foreign is not None:
        raise ValueError(f"{out} holds {foreign}, which preparing did not write: name another folder")
    names = _names(out)
    if names and PROVENANCE not in names:
        raise ValueError(f"{out} has no {PROVENANCE}, so it was not made by preparing: name another folder")
    return read_record(out / PROVENANCE) if names else None


def _foreign(out: Path) -> str | None:
    """The first file that preparing did not write; no more is looked at, for it may be anybody's whole disk."""
    for root, folders, files in os.walk(out):
        folders.sort()
        for name in sorted(files):
            relative = os.path.relpath(os.path.join(root, name), out)
            if not _is_dataset_file(relative):
                return relative
    return None


def _old(out: Path) -> Path:
    return out.with_name(f".{out.name}.old")


def _work(out: Path, key: str) -> Path:
    return out.with_name(f".{out.name}.partial-{key}")


@contextmanager
def working(out: Path, key: str) -> Iterator[Path]:
    """The folder of a run's parts, this run's alone; parts that an earlier run with the same key left are in it.

    It is removed when the run ends well or finds its data wrong (ValueError), and left for the next run otherwise.

    Raises:
        OSError: another run is at work there.
    """
    work = _work(out, key)
    work.mkdir(parents=True, exist_ok=True)
    with (work / LOCK).open("a") as lock:
        if not _locked(lock):
            raise OSError(f"another run is preparing {out}: wait for it, or name another folder")
        try:
            yield work
        except ValueError:
            _remove(work)
            raise
        _remove(work)


def _locked(file: IO[str]) -> bool:
    if _fcntl is None:
        return True
    try:
        _fcntl.flock(file, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove(work: Path) -> None:
    """Remove a folder of parts, unless something else lies in it."""
    if all(map(_is_work_file, _names(work))):
        shutil.rmtree(work)


def sweep(out: Path, keep: str = "") -> None:
    """Remove what stopped runs with other settings left beside ``out``, and an older dataset that was replaced."""
    old = _old(out)
    if out.exists() and old.is_dir() and all(map(_is_dataset_file, _names(old))):
        shutil.rmtree(old)
    for work in sorted(out.parent.glob(f".{out.name}.partial-*")):
        if work == _work(out, keep) or not (work / LOCK).is_file():
            continue
        with (work / LOCK).open("a") as lock:
            if _locked(lock):
                _remove(work)


def place(partial: Path, out: Path) -> None:
    """Rename a finished folder into place; an older one (checked by :func:`claimed`) goes out of its way first."""
    old = _old(out)
    if out.exists():
        out.rename(old)
    partial.rename(out)
    if old.exists():
        shutil.rmtree(old)
