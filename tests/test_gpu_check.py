"""``gpu_check.sh`` without a GPU: each command that it would run can be one, and one that cannot is seen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import gpu_check
from tests.gpu_check import PARTS, ROOT, Check
from tests.gpu_commands import check_command
from tests.train.world import SCRIPT, write_world

ACCELERATE = ["-m", "accelerate.commands.launch", "--config_file"]


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    return str(write_world(tmp_path))


@pytest.mark.parametrize("dry", [False, True], ids=["for a GPU", "for a dry run"])
def test_each_command_is_one(dry: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--commands", *(["--dry-run"] if dry else [])]) == 0
    shown = capsys.readouterr().out
    assert [line.split(":")[0] for line in shown.splitlines() if ": pass" in line] == list(PARTS)
    commands = [line for line in shown.splitlines() if SCRIPT.name in line]
    assert len(commands) == (14 if dry else 16)
    named = {name for name in ("zero1", "zero2", "zero3", "fsdp2") if f"configs/accelerate/{name}.yaml" in shown}
    assert named == ({"zero1", "zero2", "zero3"} if dry else {"zero1", "zero2", "zero3", "fsdp2"})
    for setting in ("--target.placement sharded", "--data.feature_dtype float8_e4m3fn", "--data.features online"):
        assert setting in shown
    assert ("--train.attention flex" in shown) != dry and "--train.kernels liger" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "RECIPE", "--train.engin", "fsdp2"], r"unknown setting '--train\.engin': did you mean"),
        (["--config", "RECIPE", "--train.attention", "fused"], r"train\.attention is 'fused', but may be plain, flex"),
        (["--config", "nowhere.yaml"], r"nowhere\.yaml"),
    ],
)
def test_settings_that_there_are_not_are_seen(words: list[str], message: str, recipe: str) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        check_command([sys.executable, str(SCRIPT), *(recipe if word == "RECIPE" else word for word in words)], ROOT)


@pytest.mark.parametrize(
    ("launcher", "message"),
    [
        ([*ACCELERATE, "configs/accelerate/zero4.yaml"], r"zero4\.yaml.* does not exist"),
        ([*ACCELERATE, "configs/accelerate/zero1.yaml", "--num_process_es", "1"], r"num_process_es"),
        (["-m", "torch.distributed.run", "--standalone", "--nproc", "1"], r"torch\.distributed\.run does not take"),
        (["-m", "nowhere.launch"], r"nowhere\.launch is no launcher here"),
        (["train/train_head.py"], r"no script train/train_head\.py"),
    ],
)
def test_launches_that_cannot_be_are_seen(launcher: list[str], message: str, recipe: str) -> None:
    script = [] if launcher[0].endswith(".py") else [str(SCRIPT)]
    with pytest.raises((ValueError, OSError), match=message):
        check_command([sys.executable, *launcher, *script, "--config", recipe], ROOT)
    with pytest.raises(FileNotFoundError, match="no interpreter"):
        check_command([f"{sys.executable}-not", str(SCRIPT), "--config", recipe], ROOT)


def test_a_part_with_a_wrong_command_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(check: Check) -> None:
        """Wrong."""
        check.accelerate("x", "zero9")

    monkeypatch.setitem(PARTS, "plain", wrong)
    assert gpu_check.main(["--commands", "plain", "flex"]) == 1
    shown = capsys.readouterr().out
    assert "plain: FAIL FileNotFoundError" in shown and "flex: pass" in shown and "failed: plain" in shown


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 1
    assert capsys.readouterr().err == "FAIL: torch sees no GPU here\n"


def test_the_script_hands_on_what_it_is_given(tmp_path: Path) -> None:
    """A stand-in for the interpreter prints what it gets."""
    stand_in = tmp_path / "python"
    stand_in.write_text('#!/bin/sh\necho "$PWD|$PYTHONPATH|$HF_HUB_OFFLINE|$*"\nexit 3\n')
    stand_in.chmod(0o755)
    script = ROOT / "tests" / "gpu_check.sh"
    plain = {"PATH": "/usr/bin:/bin"}
    words = ["bash", str(script), "zero", "--commands"]
    done = subprocess.run(
        words, cwd=tmp_path, env=plain | {"PYTHON": str(stand_in)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert done.stdout == f"{ROOT}|{ROOT}|1|tests/gpu_check.py zero --commands\n"
    missing = subprocess.run(
        ["bash", script],
        env={"PATH": "/usr/bin:/bin", "PYTHON": "nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (missing.returncode, missing.stderr) == (2, "FAIL: no interpreter at nowhere: set PYTHON\n")
