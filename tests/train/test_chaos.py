"""A short version of ``tests/chaos.py``: real kills, and mistakes in going on that it must see."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import tqdm.auto  # type: ignore[import-untyped]

from tests.chaos import INSIDE, STAGES, Chaos, own_bars
from tests.chaos_ranks import ChaosOfRanks
from train.checkpoint import Checkpoints
from train.engine_state import EngineState
from train.runlog import RunLog

WAITS = [("preparing",), ("building states", "writing states"), ("accumulating",), ("saving",)]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def chaos(folder: Path) -> Chaos:
    return Chaos(folder, 6, 32, random.Random(time.time_ns()))


def test_killed_four_times_it_is_as_if_it_had_not_been(tmp_path: Path) -> None:
    made = chaos(tmp_path)
    made.go(4, WAITS)
    assert sum(made.killed.values()) == 4 and made.runs >= 1 and made.lives >= 6
    assert set(made.killed) <= set(STAGES)
    assert sum(made.killed[stage] for stage in INSIDE) >= 1


def test_one_of_two_processes_or_their_launcher_is_killed(tmp_path: Path) -> None:
    made = ChaosOfRanks(tmp_path, 6, 32, random.Random(time.time_ns()))
    made.go(2, [("accumulating",), ("saving",)])
    assert sum(made.victims.values()) == 2 and made.victims.keys() <= {"launcher", "rank 0", "rank 1"}
    assert made.runs >= 1 and made.lives >= 3


def never_cut(self: RunLog, step: int, size: int) -> int:
    """Lines of steps that are made again stay."""
    return 0


def no_moments(self: EngineState, folder: Path) -> None:
    """The optimizer begins anew."""
    right_read(self, folder)
    self.engine.restore(self.engine.weights(), {})


right_read = EngineState.read
ACCUMULATING, SAVING = ("accumulating",), ("saving",)


@pytest.mark.parametrize(
    ("owner", "name", "mistake", "wait", "message"),
    [
        (RunLog, "cut", never_cut, ACCUMULATING, r"the log has steps \[3\] where the run goes on from 2"),
        (EngineState, "read", no_moments, ACCUMULATING, r"heads/heads\.safetensors"),
    ],
)
def test_a_mistake_in_going_on_is_seen(
    owner: Any, name: str, mistake: Any, wait: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: Any
) -> None:
    made = chaos(tmp_path)
    made.late = (4, 4)  # the fourth step is under way, and the checkpoint is that of the second
    monkeypatch.setattr(owner, name, mistake)
    with pytest.raises(AssertionError, match=message):
        made.go(1, [wait])


def test_no_kind_of_progress_bar_keeps_a_lock_that_a_dead_process_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [tqdm.std.tqdm, tqdm.auto.tqdm]
    for kind in kinds:
        monkeypatch.setattr(kind, "_lock", tqdm.std.TqdmDefaultWriteLock(), raising=False)
    own_bars()
    first, second = (kind.get_lock() for kind in kinds)
    assert first is second and isinstance(first, type(threading.RLock()))


def test_a_file_that_is_left_over_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A life that dies with a file half written, where later ones do not clear away."""
    original = Checkpoints._start

    def start(self: Checkpoints, partial: Path) -> None:
        original(self, partial)
        (partial.parent / f".{os.getpid()}.tmp").touch()

    monkeypatch.setattr(Checkpoints, "_start", start)
    with pytest.raises(AssertionError, match=r"left over: \['run/checkpoints/\.\d+\.tmp'"):
        chaos(tmp_path).go(1, [SAVING])
