"""Which of several numbered pieces of work is being done, by any process of any run that shares the disk.

A claim is a lock on one byte of a file, so it goes with the process that holds it, however that ends: nothing has to
be cleared away after a crash, and no piece is done twice at once.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

_fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None

CAN_CLAIM = _fcntl is not None
"""Elsewhere processes do not see each other's claims, and each keeps to its own share."""


class Claims:
    """Claims on pieces 0, 1, …, by way of a file that is made and stays. One object of a file in each process."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b")

    def __enter__(self) -> Claims:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()  # lets go of every claim

    @contextmanager
    def take(self, number: int) -> Iterator[bool]:
        """Whether the piece is this process's while the context lasts; never waits."""
        if _fcntl is None:
            yield True
            return
        try:
            _fcntl.lockf(self._file, _fcntl.LOCK_EX | _fcntl.LOCK_NB, 1, number)
        except (BlockingIOError, PermissionError):
            yield False
            return
        try:
            yield True
        finally:
            _fcntl.lockf(self._file, _fcntl.LOCK_UN, 1, number)
