"""Launches that would quietly run something else are refused with the one that works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
from accelerate.utils import DistributedType

from tests.train.world import ROOT, alive, finished
from train.config import RunConfig, TargetConfig, TrainConfig
from train.interrupt import StopRequest
from train.launch import LaunchError, _settle, check_engine, check_launch

NO, CPUS, DEEPSPEED, FSDP = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.DEEPSPEED,
    DistributedType.FSDP,
)
ONE = {"ACCELERATE_MIXED_PRECISION": "no"}
TWO = ONE | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("environ", "kind", "processes", "message"),
    [
        (
            TWO | {"ACCELERATE_USE_DEEPSPEED": "true"},
            CPUS,
            2,
            "DeepSpeed was asked for, but MULTI_CPU.*DS_ACCELERATOR=cpu",
        ),
        (TWO | {"ACCELERATE_USE_FSDP": "true"}, CPUS, 2, "FSDP was asked for, but MULTI_CPU.*--train.engine fsdp2"),
        (TWO | {"ACCELERATE_USE_FSDP": "true"}, FSDP, 2, "FSDP1 was asked for.*fsdp2.yaml"),
        # accelerate launch --cpu --num_processes 2
        (
            ONE | {"MASTER_ADDR": "127.0.0.1"},
            NO,
            1,
            "several processes were asked for, but one.*ACCELERATE_USE_CPU=true",
        ),
        (TWO, NO, 1, "2 processes were launched, but each runs for itself"),
    ],
)
def test_refused(environ: dict[str, str], kind: DistributedType, processes: int, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        check_launch(environ, kind, processes)


@pytest.mark.parametrize(
    ("environ", "kind", "processes"),
    [
        ({}, NO, 1),
        (ONE, NO, 1),
        ({"MASTER_ADDR": "somewhere"}, NO, 1),  # a cluster's variable, and a plain `python train_heads.py`
        (TWO, CPUS, 2),
        (TWO | {"ACCELERATE_USE_DEEPSPEED": "true"}, DEEPSPEED, 2),
        (TWO | {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, FSDP, 2),
    ],
)
def test_allowed(environ: dict[str, str], kind: DistributedType, processes: int) -> None:
    check_launch(environ, kind, processes)


def test_a_second_signal_is_not_held_back() -> None:
    # a shell's background job inherits a SIGINT that is ignored: what it usually does is said here
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.number == signal.SIGINT
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("first", StopRequest.NUMBERS)
def test_a_sigterm_close_behind_is_the_same_request(first: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's and the launcher's; or Ctrl-C, and that of a launcher which ended by it."""
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), first)
            clock[0] += 9.5
            os.kill(os.getpid(), signal.SIGTERM)
            assert (stop.number, seen) == (first, [])
            clock[0] += 1.0
            os.kill(os.getpid(), signal.SIGTERM)
            assert (stop.number, seen) == (first, [signal.SIGTERM])
            os.kill(os.getpid(), signal.SIGTERM)
            assert len(seen) == 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_child_whose_launcher_died_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.delenv("RANK", raising=False)
    stop = StopRequest()
    assert stop.number == 0
    with stop:
        monkeypatch.setattr(os, "getppid", lambda: 1)
        assert stop.number == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)  # which the system sends because of that
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    assert StopRequest().number == 0  # a plain run outlives its shell


FOLLOWING = """
import sys, time
from train.interrupt import follow_launcher
follow_launcher()
print("ready", flush=True)
time.sleep(60)
"""
LAUNCHER = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.parametrize(("environ", "ends"), [(TWO | {"TORCHELASTIC_RUN_ID": "1"}, True), (ONE, True), ({}, False)])
def test_a_process_whose_launcher_is_killed_ends(environ: dict[str, str], ends: bool) -> None:
    """Whatever it is at; a plain run goes on."""
    names = {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"}
    plain = {name: value for name, value in os.environ.items() if name not in names} | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", LAUNCHER, FOLLOWING]
    launcher = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=plain | environ)
    assert launcher.stdout is not None
    child = psutil.Process(int(launcher.stdout.readline()))
    launcher.kill()
    launcher.wait()
    try:
        deadline = time.monotonic() + (20 if ends else 0.5)
        while alive(child.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert alive(child.pid) != ends
    finally:
        with suppress(psutil.NoSuchProcess):
            child.kill()


def settings(engine: str = "launched", placement: str = "outside", **target: Any) -> RunConfig:
    return RunConfig(train=TrainConfig(engine=engine), target=TargetConfig(placement=placement, **target))


@pytest.mark.parametrize(
    ("config", "kind", "grouped", "stage", "message"),
    [
        (settings("fsdp2"), NO, False, None, "fsdp2, but 1 process was started by itself.*torchrun"),
        (settings("fsdp2"), DEEPSPEED, True, 2, "fsdp2, but DeepSpeed was launched"),
        (settings(placement="sharded"), CPUS, True, None, "sharded, which only ZeRO-3 and FSDP2 do.*zero3.yaml"),
        (settings(placement="sharded"), DEEPSPEED, True, 2, "sharded, which only ZeRO-3 and FSDP2 do"),
        (settings("fsdp2", "inside"), CPUS, True, None, "inside, but FSDP2 is given the heads alone"),
        (settings("fsdp2", "sharded", adapter="some"), CPUS, True, None, "sharded, which is for plain weights"),
        (settings("fsdp2", "sharded", quantization="int8"), CPUS, True, None, "sharded, which is for plain weights"),
    ],
)
def test_settings_that_the_launch_cannot_keep(
    config: RunConfig, kind: DistributedType, grouped: bool, stage: int | None, message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        check_engine(config, kind, 1, grouped, stage)


@pytest.mark.parametrize(
    ("config", "kind", "grouped", "stage"),
    [
        (settings(), NO, False, None),
        (settings(placement="inside"), CPUS, True, None),
        (settings("fsdp2", "sharded"), CPUS, True, None),
        (settings(placement="sharded"), FSDP, True, None),
        (settings(placement="sharded"), DEEPSPEED, True, 3),
        (settings(placement="inside"), DEEPSPEED, True, 3),
    ],
)
def test_settings_that_it_can(config: RunConfig, kind: DistributedType, grouped: bool, stage: int | None) -> None:
    check_engine(config, kind, 2, grouped, stage)


class Plugin:
    """As much of accelerate's DeepSpeed plugin as is read."""

    def __init__(self, **sections: object) -> None:
        self.deepspeed_config: dict[str, object] = {"zero_optimization": {"stage": 2}, **sections}


def test_deepspeeds_configuration_is_completed() -> None:
    plugin = Plugin(bf16={"enabled": "auto"}, fp16={"enabled": False})
    _settle(plugin, RunConfig(train=TrainConfig(clip=0.0)))
    assert plugin.deepspeed_config["gradient_clipping"] == 1e9  # 0 would not turn it off
    assert plugin.deepspeed_config["gradient_accumulation_steps"] == 1


@pytest.mark.parametrize(
    ("section", "ours"),
    [("optimizer", "train.lr"), ("scheduler", "train.schedule"), ("bf16", "train.precision")],
)
def test_what_the_recipe_decides_is_refused_in_deepspeeds(section: str, ours: str) -> None:
    with pytest.raises(LaunchError, match=rf"has a section {section}, which is set by {ours}"):
        _settle(Plugin(**{section: {"enabled": True, "type": "Adam"}}), RunConfig())


@pytest.mark.parametrize(("words", "ends"), [((), True), (("forget",), False)])
def test_the_group_is_held_to_the_end(words: tuple[str, ...], ends: bool) -> None:
    """Whatever is freed in which order at a run's end, its processes end; without the group held they would not."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environ = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = finished([*launcher, str(ROOT / "tests" / "train" / "group_worker.py"), *words], 120, environ)
    assert (done.returncode == 0) == ends, done.stderr[-3000:]
    assert ("Timeout" in done.stderr) != ends
