"""The script as people launch it: from anywhere, on two processes, under DeepSpeed, and stopped by a signal.

Each launch has a time limit: what hangs fails.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train.conftest import Launch
from tests.train.world import SCRIPT, finished, log_of, losses, run
from train.train_heads import main

SECRET = "hf_abcdefghijklmnop"
DOUBLE = ("--target.dtype", "float64", "--data.feature_dtype", "float64")


def test_two_processes_are_one(world: Path, launch: Launch) -> None:
    """Losses, acceptance and evaluation over 5 held-out conversations and 3 unequal prompts equal one process's.

    Ratios are formed of counts, each item counts once, and processes with different numbers of rounds do not hang.
    """
    recipe = world / "recipe.yaml"
    tracked = ("--tracker.kind", "wandb", "--output.folder", world / "two")
    # no key, no login, no terminal to ask on, no network; and a secret that is none of anyone's business
    keyless = {"WANDB_MODE": "", "NETRC": str(world / "none"), "HF_TOKEN": SECRET, "WANDB_SILENT": "true"}
    done = run(["--config", recipe, *DOUBLE, *tracked], processes=2, environ=keyless)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(list((world / "two" / "wandb").glob("offline-run-*"))) == 1  # one run, not one a process
    assert done.stderr.count("wandb has no key here") == 1
    assert not [path for path in (world / "two").rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    launch(*DOUBLE, "--output.folder", world / "one", "--data.cache_folder", world / "other-cache")
    one, two = log_of(world / "one"), log_of(world / "two")
    assert [line["step"] for line in two] == [line["step"] for line in one]
    for ours, theirs in zip(two, one, strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours.keys() - {"train/tokens_per_second", "train/peak_memory_gib"}:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-6, abs=1e-9), key
            assert 0 <= ours[key] <= 1 or ("acceptance" not in key and "overlap" not in key), key
    report = json.loads((world / "two" / "report.json").read_text())
    assert (report["processes"], report["decoded"]["prompts"]) == (2, 3)


def test_fewer_conversations_than_processes_is_an_error_not_a_hang(world: Path) -> None:
    lines = (world / "train.jsonl").read_text().splitlines(keepends=True)
    (world / "train.jsonl").write_text(lines[0])
    done = run(["--config", world / "recipe.yaml"], processes=2, timeout=60)
    assert done.returncode != 0
    assert "data.train has 1 conversations for 2 processes" in done.stderr


def test_two_processes_go_on_alike_and_one_process_goes_on_with_their_run(world: Path) -> None:
    """Four steps and two more are six, bit for bit; with the two on one process within rounding, and that is said."""
    steady = ("--config", world / "recipe.yaml", *DOUBLE, "--train.schedule", "constant", "--eval.prompts", "0")
    for folder, steps in (("whole", 6), ("parts", 4), ("parts", 6)):
        done = run([*steady, "--train.max_steps", str(steps), "--output.folder", world / folder], processes=2)
        assert done.returncode == 0, done.stderr[-3000:]
        if folder == "parts" and steps == 4:
            shutil.copytree(world / "parts", world / "one")
    assert "resumed: step 4 of 6" in done.stderr
    once, twice = ((world / name / "heads" / "heads.safetensors").read_bytes() for name in ("whole", "parts"))
    assert once == twice
    assert losses(world / "parts") == losses(world / "whole")
    done = run([*steady, "--train.max_steps", "6", "--output.folder", world / "one"])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "changed: 2 processes then, 1 now: the same steps on the same conversations" in done.stderr
    assert list(losses(world / "one").values()) == pytest.approx(list(losses(world / "whole").values()), rel=1e-9)


def test_zero_2_on_two_processes(world: Path, launch: Launch) -> None:
    """DeepSpeed trains the same losses as plain data parallelism, saves, and goes on from what it saved."""
    settings = json.loads((SCRIPT.parents[1] / "configs" / "deepspeed" / "zero2.json").read_text())
    assert settings["zero_optimization"]["stage"] == 2
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed", "--num_processes", "2",
        "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0",
        "--deepspeed_config_file", str(SCRIPT.parents[1] / "configs" / "deepspeed" / "zero2.json"),
        str(SCRIPT), "--config", str(world / "recipe.yaml"), "--train.micro_tokens", "90",
        "--output.folder", str(world / "zero"),
    ]  # fmt: skip
    # the operator that DeepSpeed compiles goes to a folder of this test: a build that was once killed elsewhere leaves
    # a lock behind, on which everyone after it would wait for ever
    extensions = {"TORCH_EXTENSIONS_DIR": str(world / "extensions")}
    environ = {**os.environ, **extensions, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    for steps in ("4", "6"):
        words = [*command, "--train.max_steps", steps, "--train.schedule", "constant"]
        done = finished(words, 400, environ)
        assert done.returncode == 0, done.stderr[-3000:]
    assert "resumed: step 4 of 6" in done.stderr
    launch("--train.schedule", "constant", "--output.folder", world / "one")
    assert list(losses(world / "zero").values()) == pytest.approx(list(losses(world / "one").values()), rel=1e-3)
    assert (world / "zero" / "heads" / "heads.safetensors").is_file()


def test_deepspeed_that_would_not_run_is_refused(world: Path) -> None:
    done = run(["--config", world / "recipe.yaml"], processes=2, environ={"ACCELERATE_USE_DEEPSPEED": "true"})
    assert done.returncode != 0
    assert "DeepSpeed was asked for" in done.stderr or "DS_ACCELERATOR=cpu" in done.stderr


def test_sigterm_writes_a_checkpoint_and_the_same_command_goes_on(world: Path, tmp_path: Path) -> None:
    """Launched from another folder, beside a user's own modules of our files' names."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("config", "loop", "train", "data"):
        (elsewhere / f"{name}.py").write_text("raise ImportError('the wrong module')\n")
    command = [sys.executable, str(SCRIPT), "--config", str(world / "recipe.yaml"), "--train.max_steps", "100000"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    started = subprocess.Popen(command, cwd=elsewhere, env=environ, stderr=subprocess.PIPE, text=True)
    log = world / "run" / "log.jsonl"
    deadline = time.monotonic() + 100
    while not (log.is_file() and log.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)
    started.send_signal(signal.SIGTERM)
    _, errors = started.communicate(timeout=60)
    assert started.returncode == 128 + signal.SIGTERM, errors[-3000:]
    assert "stopped by SIGTERM after step" in errors and "Run the same command again" in errors
    (place,) = (world / "run" / "checkpoints").iterdir()
    step = json.loads((place / "progress.json").read_text())["progress"]["step"]
    done = run(["--config", world / "recipe.yaml", "--train.max_steps", step + 2])
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"resumed: step {step} of {step + 2}" in done.stderr
    assert list(losses(world / "run")) == list(range(1, step + 3))


def test_an_error_is_one_line_and_no_success() -> None:
    done = run(["--train.lrr", "1"])
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last == "error: command line: unknown setting '--train.lrr': did you mean train.lr?"
    assert "Traceback" not in done.stderr


def test_a_signal_outside_the_steps_cleans_up(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM while states are computed: status 143, and no half cache."""

    def stopped(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("train.cache_build.run_target", stopped)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["--config", str(world / "recipe.yaml")]) == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
    (folder,) = (world / "cache").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["claims", "key.json"]
