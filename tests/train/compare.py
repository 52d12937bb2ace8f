"""Runs that are killed at a call of a method, and two runs compared to the last bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.train.world import log_of

CLOCKED = {"train/tokens_per_second", "train/peak_memory_gib"}


class Killed(BaseException):
    """The process ends here: nothing tidies up after it."""


@contextmanager
def killed_at(owner: Any, name: str, call: int) -> Iterator[None]:
    """The ``call``-th call of a method does not come back."""
    original, calls = getattr(owner, name), [0]

    def counting(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise Killed
        return original(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, counting)
        with pytest.raises(Killed):
            yield


def logged(folder: Path) -> list[dict[str, Any]]:
    """The log without what a clock or the machine says."""
    return [{key: value for key, value in line.items() if key not in CLOCKED} for line in log_of(folder)]


def same(whole: Path, parts: Path) -> None:
    """Weights, optimizer, generators, log and report of two runs are equal to the last bit."""
    last = sorted((whole / "checkpoints").iterdir())[-1].name
    ranks = sorted(path.name for path in (whole / "checkpoints" / last).glob("process-*.safetensors"))
    assert ranks, "each process leaves its generators"
    for name in ("heads/heads.safetensors", *(f"checkpoints/{last}/{file}" for file in
                 ("heads/heads.safetensors", "optimizer.safetensors", *ranks))):  # fmt: skip
        assert (whole / name).read_bytes() == (parts / name).read_bytes(), name
    assert logged(parts) == logged(whole)
    once, twice = (json.loads((folder / "report.json").read_text()) for folder in (whole, parts))
    assert {k: v for k, v in twice.items() if k != "seconds"} == {k: v for k, v in once.items() if k != "seconds"}
