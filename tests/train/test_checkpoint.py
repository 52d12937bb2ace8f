"""A checkpoint is whole or not there, whatever fails while it is written."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

import train.checkpoint as checkpoint
from heads import DraftHeads
from tests.train.conftest import Launch
from tests.train.world import losses


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("what", ["heads.store.save_file", "train.engine_state.save_file", "train.checkpoint.seal"])
def test_a_full_disk_leaves_the_checkpoint_before(
    world: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Saves at steps 2 and 4; the disk fills up before the second. The first stays, and the run goes on from it."""
    original = checkpoint.Checkpoints.save
    folder = world / "run" / "checkpoints"

    def save(self: Any, progress: Any) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            if progress.step == 4:
                patch.setattr(what, full_disk)
            return original(self, progress)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Checkpoints, "save", save)
        with pytest.raises(OSError, match=r"writing checkpoint .*step-00000004 failed: .*No space left on device"):
            launch("--train.save_every", 2, "--eval.prompts", 0)
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]
    launch("--train.save_every", 2, "--eval.prompts", 0)
    assert list(losses(world / "run")) == [1, 2, 3, 4, 5, 6]


def test_a_full_disk_while_the_heads_are_written(world: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is there, heads/ is not half there, and the same command finishes the job."""
    with monkeypatch.context() as patch:
        patch.setattr("train.output.write_whole", full_disk)
        with pytest.raises(OSError, match=r"writing .*heads failed: .*No space left"):
            launch("--eval.prompts", 0)
    assert not (world / "run" / "report.json").exists()
    report = launch("--eval.prompts", 0)
    assert report["steps"] == 6 and report["heldout"] is not None
    assert list(losses(world / "run")) == [1, 2, 3, 4, 5, 6]


def test_what_a_killed_run_left_is_cleared_away_and_never_loaded(world: Path, launch: Launch) -> None:
    folder = world / "run" / "checkpoints"
    (folder / ".step-00000006.partial" / "heads").mkdir(parents=True)
    (folder / "step-00000009").mkdir()  # nothing of ours: no progress.json
    launch("--eval.prompts", 0)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000006", "step-00000009"]


def test_a_run_killed_before_it_pruned_for_the_last_time_prunes_when_it_goes_on(
    world: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--train.save_every", 2, "--eval.prompts", 0, "--eval.conversations", 0, "--output.keep", 2)
    original, folder = checkpoint.Checkpoints._prune, world / "run" / "checkpoints"

    def prune(self: checkpoint.Checkpoints, best_step: int) -> None:
        if len(self.there()) == 3:
            raise KeyboardInterrupt
        original(self, best_step)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Checkpoints, "_prune", prune)
        with pytest.raises(KeyboardInterrupt):
            launch(*words)
    assert sorted(path.name for path in folder.iterdir())[0] == "step-00000002"
    launch(*words)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000004", "step-00000006"]


def test_a_checkpoint_is_a_heads_folder_without_the_targets_weights(world: Path, launch: Launch) -> None:
    launch("--eval.prompts", 0)
    place = world / "run" / "checkpoints" / "step-00000006"
    heads = DraftHeads.from_pretrained(place / "heads")
    assert heads.config.lookahead == 3
    trained = sum(p.numel() for p in heads.parameters())
    assert (place / "optimizer.safetensors").stat().st_size < 1.1 * trained * 4 * 2 + 8192
    assert not list(place.rglob("*.bin")) + list(place.rglob("*.pt")), "no pickle"


def test_differences_are_named() -> None:
    assert checkpoint.differences({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": None}) == ["b 2 → 3"]
    assert checkpoint.differences({"a": 1}, {"a": 1}) == []
