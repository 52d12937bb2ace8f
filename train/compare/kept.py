"""Figures of prompts that were decoded already, a line each in a file, so that a comparison that was stopped goes on.

What they hang on (weights, prompts, lengths, seed, the program's version) is in the file's name and in each line's key.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from infer.metrics import Round, Stats

Figures = tuple[dict[str, Stats], dict[str, Stats]]
"""Of one prompt: by budget, and by budget and temperature."""
COUNTS = ("proposed", "depth", "accepted", "emitted", "looped")


class Kept:
    """One contestant's.

    Args:
        folder: of the files.
        name: for people who look for it.
        of: everything that the figures hang on, beside the prompt.
    """

    def __init__(self, folder: Path, name: str, of: Mapping[str, Any]) -> None:
        plain = "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in name)
        about = json.dumps({**of, "headstart": version("headstart")}, sort_keys=True)
        self.path = folder / f"{plain}-{hashlib.sha256(about.encode()).hexdigest()[:12]}.jsonl"
        self._found: dict[str, Figures] = {}
        if self.path.is_file():
            self._read()

    def _read(self) -> None:
        """What a killed run wrote half is cut off."""
        whole = 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            stored = json.loads(line)
            self._found[stored["prompt"]] = (_stats(stored["greedy"]), _stats(stored["decoded"]))
            whole += len(line)
        os.truncate(self.path, whole)

    def find(self, prompt: str) -> Figures | None:
        """Of a prompt, by what tells it from all others."""
        return self._found.get(_short(prompt))

    def add(self, prompt: str, figures: Figures) -> None:
        """Write them down."""
        key, (greedy, decoded) = _short(prompt), figures
        self._found[key] = figures
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            line = {"prompt": key, "greedy": _plain(greedy), "decoded": _plain(decoded)}
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _short(prompt: str) -> str:
    return hashlib.sha256(prompt.encode()).hexdigest()[:24]


def _plain(found: Mapping[str, Stats]) -> dict[str, Any]:
    return {
        name: [stats.tokens, [[int(getattr(one, count)) for count in COUNTS] for one in stats.log]]
        for name, stats in found.items()
    }


def _stats(stored: Mapping[str, Any]) -> dict[str, Stats]:
    found = {}
    for name, (tokens, log) in stored.items():
        found[name] = Stats(tokens=tokens)
        for proposed, depth, accepted, emitted, looped in log:
            found[name].log.append(Round(proposed, depth, accepted, emitted, looped=bool(looped)))
    return found
