"""log.jsonl: a line for whatever is logged at a step, and cutting it back to where a run goes on from."""

from __future__ import annotations

import json
import math
from pathlib import Path

from train.files import write_whole

LOG = "log.jsonl"


class RunLog:
    """The log of one run folder; one process writes it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOG

    @property
    def bytes(self) -> int:
        """Its size; 0 when there is none."""
        return self.path.stat().st_size if self.path.is_file() else 0

    def append(self, step: int, values: dict[str, float]) -> None:
        """Add a line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    def cut(self, step: int, size: int) -> int:
        """Keep what was logged up to a checkpoint at ``step``, when the log had ``size`` bytes; returns lines dropped.

        What lies beyond that size was logged afterwards, by a run that did not get as far as its next checkpoint. Of
        a log that is shorter, or was begun anew, whole lines of earlier steps are kept.
        """
        if not self.path.is_file():
            return 0
        content = self.path.read_bytes()
        kept = [line for line in content[:size].splitlines(keepends=True) if _step(line) <= step]
        if kept:
            whole = b"".join(kept)
            if whole != content:
                write_whole(self.path, whole.decode())
        else:
            self.path.unlink()
        return len(content.splitlines()) - len(kept)


def _step(line: bytes) -> float:
    """The step of a line; infinity for one that was not finished."""
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf
