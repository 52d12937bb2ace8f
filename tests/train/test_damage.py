"""Checkpoints that are no longer what was written: named, set aside, never loaded; and what killed runs leave."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.compare import same
from tests.train.conftest import Launch
from tests.train.world import losses

STEPS = ("--train.save_every", 2, "--eval.prompts", 0, "--output.keep", 3)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    """One bit in the middle: the size stays."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def edit(path: Path) -> None:
    content = json.loads(path.read_text())
    content["progress"]["step"] = 5
    path.write_text(json.dumps(content))


# what happens to a file of the newest checkpoint → how it is named
DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "weights cut": ("heads/heads.safetensors", cut, r"heads/heads\.safetensors has \d+ bytes of \d+"),
    "a bit of the optimizer": ("optimizer.safetensors", flip, r"optimizer\.safetensors is not what was written"),
    "generators gone": ("process-0.safetensors", Path.unlink, r"process-0\.safetensors is missing"),
    "progress cut": ("progress.json", cut, r"progress\.json is cut short or no JSON"),
    "progress edited": ("progress.json", edit, r"progress\.json is not what was written"),
    "progress gone": ("progress.json", Path.unlink, r"progress\.json is missing"),
    "no bytes": ("heads/config.json", lambda path: path.write_bytes(b""), r"heads/config\.json has 0 bytes of \d+"),
}


@pytest.fixture(scope="module")
def _trained(_world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with checkpoints at 2, 4 and 6, trained once for all tests here."""
    from tests.train.conftest import _reset
    from train.train_heads import train

    folder = tmp_path_factory.mktemp("trained")
    _reset()
    train(["--config", str(_world / "recipe.yaml"), "--output.folder", str(folder / "run"), *map(str, STEPS)])
    return folder / "run"


@pytest.fixture
def run(_trained: Path, world: Path, _world: Path) -> Path:
    """The same as a run that ended before its heads were written; the recipe is the one it was trained by."""
    shutil.copytree(_trained, world / "run")
    shutil.rmtree(world / "run" / "heads")
    (world / "run" / "report.json").unlink()
    (world / "recipe.yaml").write_text((_world / "recipe.yaml").read_text())
    return world / "run"


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_last_whole_one_is_gone_on_from(
    damage: str, run: Path, _trained: Path, launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, harm, told = DAMAGE[damage]
    place = run / "checkpoints" / "step-00000006"
    harm(place / name)
    broken = {path.relative_to(place): path.read_bytes() for path in place.rglob("*") if path.is_file()}
    launch("--output.folder", run, *STEPS)
    said = capsys.readouterr().err
    assert "resumed: step 4 of 6" in said
    assert re.search(rf"warning: checkpoint .*step-00000006 is damaged \({told}\): kept as .*06\.damaged", said)
    aside = run / "checkpoints" / "step-00000006.damaged"
    assert {path.relative_to(aside): path.read_bytes() for path in aside.rglob("*") if path.is_file()} == broken
    shutil.rmtree(aside)
    same(_trained, run)


def test_where_none_is_whole_nothing_is_touched(run: Path, launch: Launch) -> None:
    for step in (2, 4, 6):
        flip(run / "checkpoints" / f"step-0000000{step}" / "optimizer.safetensors")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"no checkpoint of this run is whole \(.*06: opt.*; .*04: opt.*; .*02: opt"):
        launch("--output.folder", run, *STEPS)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_two_damaged_in_turn_are_both_kept(run: Path, launch: Launch) -> None:
    for number in (1, 2):
        flip(run / "checkpoints" / "step-00000006" / "optimizer.safetensors")
        launch("--output.folder", run, *STEPS, "--train.max_steps", 6, "--train.epochs", number)
    names = {path.name for path in (run / "checkpoints").iterdir()}
    assert {"step-00000006.damaged", "step-00000006.damaged-2", "step-00000006"} <= names


def test_what_killed_runs_left_is_finished(run: Path, _trained: Path, launch: Launch) -> None:
    """Half written, half removed, and the one that was put out of the way of a newer one, which did not come."""
    folder = run / "checkpoints"
    (folder / ".step-00000008.partial" / "heads").mkdir(parents=True)
    (folder / ".step-00000001.gone").mkdir()
    (folder / "step-00000006").rename(folder / ".step-00000006.old")
    shutil.copytree(folder / "step-00000004", folder / ".step-00000004.old")
    launch("--output.folder", run, *STEPS)
    same(_trained, run)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000004", "step-00000006"]


def test_what_is_not_ours_is_left_alone(run: Path, launch: Launch) -> None:
    folder = run / "checkpoints"
    (folder / "step-00000009").mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / ".step-old").mkdir()
    launch("--output.folder", run, "--train.save_every", 2, "--eval.prompts", 0, "--output.keep", 1)
    names = {path.name for path in folder.iterdir()}
    assert {"step-00000009", "notes.txt", ".step-old"} <= names


def test_the_best_is_exported_only_when_it_is_whole(
    world: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([2.0, 1.5, 1.2])
    monkeypatch.setattr("train.evaluation.Evaluation.score", property(lambda self: next(scores)))
    recipe = ("--eval.every", 2, "--output.export", "best", "--output.keep", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.train_heads.finish", lambda *_: {})
        launch(*recipe)
    flip(world / "run" / "checkpoints" / "step-00000002" / "heads" / "heads.safetensors")
    with pytest.raises(OSError, match=r"best checkpoint .*step-00000002 is damaged \(heads.*output\.export last"):
        launch(*recipe)
    assert not (world / "run" / "heads").exists()


def test_a_checkpoint_of_another_version_is_not_guessed_at(run: Path, launch: Launch) -> None:
    for place in (run / "checkpoints").iterdir():
        content = json.loads((place / "progress.json").read_text())
        (place / "progress.json").write_text(json.dumps({k: content[k] for k in ("progress", "processes", "settings")}))
    with pytest.raises(ValueError, match=r"has format 1, this version reads 2: set output\.folder to a new folder"):
        launch("--output.folder", run, *STEPS)


def test_old_ones_are_pruned(world: Path, launch: Launch) -> None:
    launch("--train.save_every", 1, "--eval.prompts", 0, "--eval.conversations", 0, "--train.max_steps", 5)
    names = sorted(path.name for path in (world / "run" / "checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000005"]
    assert list(losses(world / "run")) == [1, 2, 3, 4, 5]
