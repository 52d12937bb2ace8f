"""run.json: what a run was made with, for whoever finds the folder later, and without a secret."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from tests.train.compare import killed_at
from tests.train.conftest import Launch
from tests.train.world import ROOT
from train.record import git_revision
from train.step import Stepper

SHORT = ("--eval.prompts", 0, "--train.max_steps", 2)


def record(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "run.json").read_text()))


def test_what_a_run_was_made_with(world: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train_heads.py", "--config", "recipe.yaml"])
    report = launch(*SHORT)
    found = record(world / "run")
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["transformers"] == transformers.__version__
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["config"]["train"]["max_steps"] == 2 and found["config"]["train"]["beta2"] == 0.95
    assert found["config"] == yaml.safe_load((world / "run" / "config.yaml").read_text())
    assert found["data"]["train"]["sha256"] == report["data"]["digest"]
    assert (found["data"]["train"]["conversations"], found["data"]["heldout"]["conversations"]) == (24, 5)
    assert found["target"]["weights"] and found["steps"] == 2
    assert found["parameters"] == sum(
        value.numel() for name, value in weights(world / "run").items() if name != "target_ids"
    )
    world_ = found["world"]
    assert (world_["processes"], world_["engine"], world_["threads"]) == (1, "ddp", torch.get_num_threads())
    assert world_["device"].startswith("cpu (")
    (only,) = found["launches"]
    assert only["command"] == ["train_heads.py", "--config", "recipe.yaml"]
    assert (only["from_step"], only["processes"]) == (0, 1) and only["started"].endswith("+00:00")
    assert found["git"] == git_revision(ROOT)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "heads" / "heads.safetensors")


def test_every_launch_of_a_run_is_listed(world: Path, launch: Launch) -> None:
    with killed_at(Stepper, "run", 2):
        launch(*SHORT, "--train.save_every", 1)
    first = record(world / "run")
    launch(*SHORT, "--train.save_every", 1)
    second = record(world / "run")
    assert second["id"] == first["id"]
    assert [each["from_step"] for each in second["launches"]] == [0, 1]
    launch(*SHORT, "--train.save_every", 1)  # it is finished: nothing was launched
    assert record(world / "run") == second


def test_secrets_do_not_get_in(world: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "hf_abcdefghijklmnop"
    monkeypatch.setenv("HF_TOKEN", secret)
    monkeypatch.setattr(sys, "argv", ["train_heads.py", f"--tracker.project=x{secret}", "https://me:word@host/x"])
    launch(*SHORT, "--tracker.project", f"x{secret}")
    for name in ("run.json", "config.yaml", "report.json", "log.jsonl"):
        text = (world / "run" / name).read_text()
        assert secret not in text and "me:word" not in text, name
    assert record(world / "run")["launches"][0]["command"][1:] == [
        "--tracker.project=x(hidden)",
        "https://(hidden)@host/x",
    ]


def test_a_refused_run_does_not_overwrite_what_is_there(world: Path, launch: Launch) -> None:
    """Settings that the checkpoints are not of: the folder still says what they are of."""
    launch(*SHORT)
    before = [(world / "run" / name).read_text() for name in ("run.json", "config.yaml")]
    with pytest.raises(ValueError, match="other settings"):
        launch(*SHORT, "--train.lr", 0.5)
    assert [(world / "run" / name).read_text() for name in ("run.json", "config.yaml")] == before


def test_a_revision_only_of_a_checkout(tmp_path: Path) -> None:
    assert git_revision(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert git_revision(tmp_path) is None, "no commit yet"
    (tmp_path / "file").write_text("one")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    found = git_revision(tmp_path)
    assert found is not None and len(found["commit"]) == 40 and found["changed"] is False
    (tmp_path / "file").write_text("two")
    changed = git_revision(tmp_path)
    assert changed == {"commit": found["commit"], "changed": True}
