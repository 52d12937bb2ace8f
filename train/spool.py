"""A folder through which trainers ask other processes for the target's states.

    spool/   about.json              the target, its taps and how states are rounded: what a worker has to know
             run-…                   held by the run while it lives
             requests/NAME           ids and loss mask of a batch; whoever computes it holds a lock on it
             answers/NAME            its states by column, or NAME.error, why there are none
             workers/NAME            held by a worker while it lives

Files are written beside their place and renamed. Locks go with the process that holds them, so a request of a worker
that died is free for the next one, and workers notice when their run has ended, however it ended.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load, load_file, save_file
from torch import Tensor

from heads.beside import beside
from train.files import try_lock, write_whole

_fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None

ABOUT = "about.json"
FOLDERS = ("requests", "answers", "workers")
SHORT, LONG = 0.002, 0.1  # seconds between looks: at first, and after a while


def pauses() -> Iterator[float]:
    """Seconds to sleep between looks, longer and longer."""
    pause = SHORT
    while True:
        yield pause
        pause = min(LONG, pause * 1.3)


class Spool:
    """One run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests, self.answers, self.workers = (folder / name for name in FOLDERS)
        self._run: Any = None

    def create(self, about: dict[str, Any]) -> None:
        """Make it for a run, empty, and hold it as long as this process lives.

        Raises:
            OSError: another run that lives holds it.
        """
        before = self.about()
        if before is not None and self.in_use(before):
            raise OSError(
                f"{self.folder} is in use by another run: set data.spool_folder to a folder of this run's own"
            )
        self.remove()
        for name in FOLDERS:
            (self.folder / name).mkdir(parents=True)
        run = self.folder / f"run-{os.getpid()}-{time.time_ns()}"
        self._run = run.open("wb")
        if _fcntl is not None:
            _fcntl.flock(self._run, _fcntl.LOCK_EX)
        write_whole(self.folder / ABOUT, json.dumps({**about, "run": run.name}, indent=1) + "\n")

    def about(self) -> dict[str, Any] | None:
        """What a worker has to know; None as long as there is no run."""
        try:
            found: dict[str, Any] = json.loads((self.folder / ABOUT).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return found

    def in_use(self, about: dict[str, Any]) -> bool:
        """Whether the run that wrote ``about`` still lives."""
        return _locked(self.folder / about["run"])

    def let_go(self) -> None:
        """End the hold of :meth:`create`: the run has ended, for all who look."""
        if self._run is not None:
            self._run.close()
            self._run = None

    def remove(self) -> None:
        """The folder and all of a run in it; what else lies there keeps it."""
        for name in FOLDERS:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        for path in [self.folder / ABOUT, *self.folder.glob("run-*")]:
            path.unlink(missing_ok=True)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    # what trainers do

    def ask(self, name: str, ids: Tensor, loss_mask: Tensor) -> None:
        """Put a request; ids and loss mask (B, T)."""
        _put(self.requests / name, {"ids": ids, "loss_mask": loss_mask})

    def answer(self, name: str) -> dict[str, Tensor] | None:
        """A request's states by column, (B, T, width) each, which are then this process's alone; None for not yet.

        Raises:
            ValueError: the worker could not compute them; says why.
        """
        failed = self.answers / f"{name}.error"
        if failed.is_file():
            raise ValueError(f"a feature worker failed: {failed.read_text(encoding='utf-8')}")
        path = self.answers / name
        if not path.is_file():
            return None
        columns = load_file(path)  # memory-mapped: it stays readable without its name
        path.unlink()
        return columns

    def any_worker(self) -> bool:
        """Whether a worker is at work here."""
        return any(_locked(path) for path in self.workers.glob("*"))

    # what workers do

    @contextmanager
    def working(self, name: str) -> Iterator[None]:
        """Be a worker of that name."""
        with (self.workers / name).open("a+b") as file:
            if _fcntl is not None:
                _fcntl.flock(file, _fcntl.LOCK_EX)
            yield

    @contextmanager
    def claimed(self) -> Iterator[tuple[str, dict[str, Tensor]] | None]:
        """The oldest request that nobody works on, this process's while the context lasts; None when there is none.

        It is gone afterwards, if the context ended without an error.
        """
        for path in sorted(self.requests.glob("*.safetensors")):
            try:
                file = path.open("r+b")
            except FileNotFoundError:
                continue
            with file:
                if not try_lock(file) or not path.exists():  # another's, or answered since
                    continue
                yield path.name, load(file.read())
                path.unlink()
                return
        yield None

    def reply(self, name: str, columns: dict[str, Tensor]) -> None:
        """Put a request's states."""
        _put(self.answers / name, columns)

    def fail(self, name: str, why: str) -> None:
        """Say why there are none."""
        partial = self.answers / f".{name}.error"
        partial.write_text(why, encoding="utf-8")
        os.replace(partial, self.answers / f"{name}.error")


def _put(path: Path, tensors: dict[str, Tensor]) -> None:
    with beside(path) as partial:
        save_file(tensors, partial)


def _locked(path: Path) -> bool:
    """Whether a living process holds a file or folder."""
    if _fcntl is None:
        return True
    try:
        number = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(number)
    finally:
        os.close(number)


def wait_until(ready: Any, seconds: float) -> bool:
    """Whether ``ready()`` became true in time."""
    deadline = time.monotonic() + seconds
    for pause in pauses():
        if ready():
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return False
