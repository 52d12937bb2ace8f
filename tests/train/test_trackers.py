"""Curves reach the tracker, one run each, without a network, a question or a secret."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.compare import killed_at
from tests.train.conftest import Launch as Go
from tests.train.world import ROOT
from train.config import RunConfig
from train.step import Stepper
from train.trackers import HIDDEN, SETUP, Launch, without_secrets

SECRET = "hf_abcdefghijklmnop"


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch, world: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(world / "no-netrc"))


def written(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file() and "target" not in path.parts)


def test_tensorboard(world: Path, launch: Go) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    launch("--tracker.kind", "tensorboard", "--tracker.run", SECRET, "--eval.prompts", 1)
    (events,) = (world / "run" / "headstart").glob("events.*")
    reader = EventAccumulator(str(events))
    reader.Reload()
    assert [event.step for event in reader.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert set(reader.Tags()["scalars"]) >= {
        "train/loss", "train/soft_ce/1", "train/soft_ce/3", "train/acceptance/1", "train/acceptance/3",
        "train/lr", "train/grad_norm", "train/tokens_per_second", "train/peak_memory_gib",
        "heldout/loss", "heldout/acceptance/2", "decoded/tokens_per_round", "decoded/acceptance/1",
    }  # fmt: skip
    assert SECRET.encode() not in written(world / "run")


def test_wandb_records_offline_without_asking(world: Path, launch: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    launch("--tracker.kind", "wandb", "--eval.prompts", 0, "--tracker.project", SECRET[:5] + "x")
    (run,) = (world / "run" / "wandb").glob("offline-run-*")
    assert list(run.glob("*.wandb"))
    assert SECRET.encode() not in written(world / "run")


def trackio_rows(project: str) -> tuple[Path, list[tuple[str, int, str]]]:
    """The database, which lies where the environment said when trackio was imported, and what it holds of a project."""
    from trackio.sqlite_storage import SQLiteStorage

    path = Path(SQLiteStorage.get_project_db_path(project))
    query = "select run_name, step, metrics from metrics order by step"
    return path, sqlite3.connect(path).execute(query).fetchall()


def test_trackio(world: Path, launch: Go) -> None:
    launch("--tracker.kind", "trackio", "--tracker.project", "once", "--tracker.run", "mine", "--eval.prompts", 0)
    path, rows = trackio_rows("once")
    assert {row[0] for row in rows} == {"mine"}
    assert [step for _, step, values in rows if "train/loss" in json.loads(values)] == [1, 2, 3, 4, 5, 6]
    assert SECRET.encode() not in written(path.parent)


# a run that was killed at its fifth step, and goes on from its third


def killed_and_gone_on(launch: Go, *settings: object) -> None:
    steps = ("--train.save_every", 3, "--eval.prompts", 0, "--eval.conversations", 0)
    with killed_at(Stepper, "run", 6):
        launch(*steps, *settings)
    launch(*steps, *settings)


def test_tensorboard_shows_each_step_once(world: Path, launch: Go) -> None:
    """What was written after the checkpoint is purged when the run goes on."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    killed_and_gone_on(launch, "--tracker.kind", "tensorboard")
    reader = EventAccumulator(str(world / "run" / "headstart"))
    reader.Reload()
    assert [event.step for event in reader.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]


def test_trackio_holds_each_step_once(world: Path, launch: Go) -> None:
    killed_and_gone_on(launch, "--tracker.kind", "trackio", "--tracker.project", "twice", "--tracker.run", "mine")
    _, rows = trackio_rows("twice")
    assert {row[0] for row in rows} == {"mine"}
    assert [step for _, step, values in rows if "train/loss" in json.loads(values)] == [1, 2, 3, 4, 5, 6]


def test_wandb_knows_it_is_the_same_run(world: Path, launch: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    killed_and_gone_on(launch, "--tracker.kind", "wandb")
    names = [path.name.split("-")[3] for path in (world / "run" / "wandb").glob("offline-run-*")]
    assert len(names) == 2 and set(names) == {json.loads((world / "run" / "run.json").read_text())["id"]}


@pytest.mark.parametrize("mode", ["", "online", "run"])
def test_wandb_without_a_key_never_asks(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever mode was set: with neither a key nor a login it would stop and ask."""
    monkeypatch.setenv("WANDB_MODE", mode)
    SETUP["wandb"](RunConfig(), Launch("0a1b", again=False, step=0))
    assert os.environ["WANDB_MODE"] == "offline"


def test_a_key_is_used(monkeypatch: pytest.MonkeyPatch, world: Path) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789")
    options = SETUP["wandb"](RunConfig(), Launch("0a1b", again=True, step=3))
    assert "WANDB_MODE" not in os.environ
    assert (options["id"], options["resume"], options["name"]) == ("0a1b", "allow", "heads")


def test_a_tracker_that_is_not_installed_is_told_at_once(launch: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"tracker\.kind is trackio, which is not installed: pip install -e '\.\[trackio\]'"
    ):
        launch("--tracker.kind", "trackio")


def test_secrets_are_hidden_wherever_they_stand() -> None:
    environ = {"HF_TOKEN": SECRET, "AWS_SECRET_ACCESS_KEY": "0123456789", "HOME": "/root/home", "SHORT_KEY": "ab"}
    shown = without_secrets(
        {
            "api_key": "anything",
            "nested": [{"path": f"/x/{SECRET}/y"}, "0123456789"],
            "proxy": "https://user:word@host/x",
            "home": "/root/home",
            "count": 3,
            "short": "ab",
        },
        environ,
    )
    assert shown == {
        "api_key": HIDDEN,
        "nested": [{"path": f"/x/{HIDDEN}/y"}, HIDDEN],
        "proxy": f"https://{HIDDEN}@host/x",
        "home": "/root/home",
        "count": 3,
        "short": "ab",
    }


def test_extras_are_imported_only_when_used() -> None:
    """A run without trackers needs none of them (nor deepspeed)."""
    code = (
        "import sys\n"
        "for name in ('wandb', 'trackio', 'tensorboard', 'deepspeed'): sys.modules[name] = None\n"
        "import train.train_heads, train.commands\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=100)
