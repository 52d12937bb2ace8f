"""The Slurm script: before a job's time is up its run is stopped, the job queued again, and it goes on where it was."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.train.conftest import Launch
from tests.train.test_two_machines import free_port
from tests.train.two_machines import ROOT, command, environment
from tests.train.world import finished, log_of, losses

# In place of `accelerate launch`: a run that ends by itself, or when it is asked to; sometimes a little later, or well.
RUN = """#!/usr/bin/env bash
trap 'sleep 0.2; echo asked >> "$TEST_FOLDER/run.log"; exit "$TEST_ENDS"' TERM
touch "$TEST_FOLDER/running"
for _ in $(seq "$TEST_TENTHS"); do sleep 0.1; done
exit 3
"""
STOP = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from train import interrupt, step, train_heads

held, steps = [], []
enter, run = interrupt.StopRequest.__enter__, step.Stepper.run


def entered(self):
    held.append(self)
    return enter(self)


def counted(self, *arguments, **options):
    done = run(self, *arguments, **options)
    steps.append(done)
    if os.environ["TEST_LIFE"] == "1" and len(steps) == 3:
        if os.environ.get("RANK", "0") == "0":
            os.kill(int(os.environ["TEST_BATCH"]), signal.SIGUSR1)  # the time is nearly up
        while not held[-1].number:
            time.sleep(0.01)
    return done


interrupt.StopRequest.__enter__, step.Stepper.run = entered, counted
train_heads.leave(train_heads.script())
"""


def queued_again(folder: Path) -> list[str]:
    """What the script had Slurm do."""
    path = folder / "scontrol.log"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(
    ("sent", "ends", "tenths", "status", "queued"),
    [
        (signal.SIGUSR1, 1, 600, 1, True),
        (signal.SIGTERM, 1, 600, 1, False),  # scancel
        (signal.SIGUSR1, 0, 600, 0, False),  # it was done in that very moment
        (None, 1, 1, 3, False),  # an error of its own
    ],
)
def test_a_job_is_queued_again_when_its_time_is_up(
    tmp_path: Path, sent: signal.Signals | None, ends: int, tenths: int, status: int, queued: bool
) -> None:
    environ = environment(tmp_path, 29999, "nodes", nodes=1)
    (tmp_path / "slurm" / "accelerate").write_text(RUN)
    (tmp_path / "run" / "checkpoints" / "step-1").mkdir(parents=True)
    environ |= {"TEST_ENDS": str(ends), "TEST_TENTHS": str(tenths)}
    job = subprocess.Popen(command("nodes"), env=environ, cwd=tmp_path)
    try:
        if sent is not None:
            while not (tmp_path / "running").exists():
                assert job.poll() is None
                time.sleep(0.01)
            job.send_signal(sent)
        assert job.wait(60) == status
    finally:
        job.kill()
    assert queued_again(tmp_path) == (["requeue 9999 step-1"] if queued else [])
    assert (tmp_path / "run.log").exists() == (sent is not None), (
        "the script waits for the run that it has asked to stop"
    )


def test_a_run_that_was_queued_again_goes_on(world: Path, launch: Launch) -> None:
    """Two processes as `accelerate launch` starts them, stopped in the third of six steps."""
    (world / "train").mkdir()
    (world / "train" / "train_heads.py").write_text(STOP.format(root=str(ROOT)))
    words = command("cpu2", "--config", str(world / "recipe.yaml"), "--eval.prompts", "0")
    environ = environment(world, free_port(), "cpu2", nodes=1, processes=2)
    started = lambda life: finished(words, 500, {**environ, "TEST_LIFE": life}, world)  # noqa: E731
    first = started("1")
    assert first.returncode != 0 and "stopped by SIGTERM after step 3; checkpoint written to" in first.stderr
    assert queued_again(world) == [f"requeue {environ['SLURM_JOB_ID']} step-00000003"]
    second = started("2")
    assert second.returncode == 0, second.stderr[-4000:]
    assert "resumed: step 3 of 6" in second.stderr and len(queued_again(world)) == 1
    report = json.loads((world / "run" / "report.json").read_text())
    assert (report["processes"], report["steps"]) == (2, 6)
    launch("--eval.prompts", 0, "--output.folder", world / "one")
    assert [line["step"] for line in log_of(world / "run") if "train/loss" in line] == [1, 2, 3, 4, 5, 6]
    assert list(losses(world / "run").values()) == pytest.approx(list(losses(world / "one").values()), rel=2e-5)


@pytest.mark.parametrize("kind", ["cpu1", "nodes"])
def test_a_run_of_one_process_goes_on(kind: str, world: Path, launch: Launch) -> None:
    """Whether its launcher waits for it or ends before it, the job is queued again behind the checkpoint."""
    (world / "train").mkdir()
    (world / "train" / "train_heads.py").write_text(STOP.format(root=str(ROOT)))
    environ = environment(world, free_port(), kind, nodes=1) | {"TEST_LIFE": "1"}
    words = command(kind, "--config", str(world / "recipe.yaml"), "--eval.prompts", "0")
    stopped = finished(words, 240, environ, world)
    assert stopped.returncode != 0 and "stopped by SIGTERM after step 3; checkpoint written to" in stopped.stderr
    assert queued_again(world) == [f"requeue {environ['SLURM_JOB_ID']} step-00000003"]
    launch("--eval.prompts", 0)
    launch("--eval.prompts", 0, "--output.folder", world / "one")
    assert [line["step"] for line in log_of(world / "run") if "train/loss" in line] == [1, 2, 3, 4, 5, 6]
    assert losses(world / "run") == losses(world / "one")
