"""Launches that would quietly run something else are refused with the one that works."""

from __future__ import annotations

import os
import signal

import pytest
from accelerate.utils import DistributedType

from train.interrupt import StopRequest
from train.launch import LaunchError, check_launch

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
        (TWO | {"ACCELERATE_USE_FSDP": "true"}, CPUS, 2, "FSDP was asked for, but MULTI_CPU"),
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
        (TWO | {"ACCELERATE_USE_FSDP": "true"}, FSDP, 2),
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


def test_a_child_whose_launcher_died_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.delenv("RANK", raising=False)
    stop = StopRequest()
    assert stop.number == 0
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert stop.number == signal.SIGTERM
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    assert StopRequest().number == 0  # a plain run outlives its shell
