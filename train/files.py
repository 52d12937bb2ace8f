"""Files of a run folder: written whole or not at all, told apart by their hashes, and the folder held by one run."""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from train.ranks import Ranks

_fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None
"""Locks; elsewhere two runs in one folder are not told apart."""


def write_whole(path: Path, text: str) -> None:
    """Write a text file beside its place and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk and not only on their way to it."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def held(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Hold a folder, made if need be, so that no other run works in it; it is let go when the process ends, however.

    Raises:
        OSError: another run holds it; raised on every process.
    """
    numbers: list[int] = []
    ranks.on_main(lambda: numbers.append(_lock(folder)), f"starting in {folder}")
    try:
        yield
    finally:
        for number in numbers:
            _HELD.discard(number)
            os.close(number)


def try_lock(file: Any) -> bool:
    """Hold an open file, or its number, unless another process does; never waits. True where there are no locks."""
    if _fcntl is None:
        return True
    try:
        _fcntl.flock(file, _fcntl.LOCK_EX | _fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    number = os.open(folder, os.O_RDONLY)
    if not try_lock(number):
        os.close(number)
        raise OSError("another run is at work there: wait for it or stop it, or set output.folder to another folder")
    _HELD.add(number)
    return number


_HELD: set[int] = set()


def _let_go() -> None:
    """In a forked child, so that a worker that outlives its killed parent does not hold the folder."""
    for number in _HELD:
        os.close(number)
    _HELD.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
