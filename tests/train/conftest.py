"""A world to train in, made once, and each in-process run with a fresh accelerate state."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState, GradientState

from tests.train.world import RECIPE, write_world
from train.train_heads import train


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    """accelerate keeps its state for the life of a process; a test's run must not meet an earlier one's."""
    _reset()
    yield
    _reset()


def _reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(scope="session")
def _world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_world(folder)
    return folder


@pytest.fixture
def world(_world: Path, tmp_path: Path) -> Path:
    """A folder with target, data and recipe.yaml of its own; nothing has been trained in it."""
    for entry in _world.iterdir():
        if entry.name == "target":
            (tmp_path / "target").symlink_to(entry)
        elif entry.suffix == ".jsonl":
            shutil.copy(entry, tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(folder=tmp_path))
    return tmp_path


# trackio reads this when it is imported, whichever test is the first to do that
os.environ["TRACKIO_DIR"] = tempfile.mkdtemp(prefix="headstart-trackio-")
atexit.register(shutil.rmtree, os.environ["TRACKIO_DIR"], ignore_errors=True)

Launch = Callable[..., dict[str, Any]]


@pytest.fixture
def launch(world: Path) -> Launch:
    """Train in this process: ``launch("--train.max_steps", 3)`` → the report."""

    def go(*arguments: Any) -> dict[str, Any]:
        _reset()
        return train(["--config", str(world / "recipe.yaml"), *map(str, arguments)])

    return go
