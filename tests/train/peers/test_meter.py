"""A run's memory and time are its own, its errors are told, and none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from train.peers import meter
from train.peers.meter import RunFailed

PYTHON = [sys.executable, "-S", "-c"]


def test_the_peak_is_the_commands_own_however_large_this_process_is(tmp_path: Path) -> None:
    here = bytearray(b"x" * (80 << 20))
    little = meter.run([*PYTHON, "pass"], os.environ, tmp_path / "log")
    much = meter.run([*PYTHON, "held = b'x' * (100 << 20)"], os.environ, tmp_path / "log")
    assert little.peak < 40 << 20 < len(here), "a plain subprocess would have begun with our own peak"
    assert 100 << 20 < much.peak < 160 << 20


def test_seconds_are_of_clock_and_of_processor(tmp_path: Path) -> None:
    slept = meter.run([*PYTHON, "import time; time.sleep(0.4)"], os.environ, tmp_path / "log")
    assert slept.seconds > 0.4 and slept.processor < 0.3
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    assert meter.run([*PYTHON, busy], os.environ, tmp_path / "log").processor >= 0.3


def test_an_error_shows_the_end_of_the_log(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"ended with status 7; the end of .*log: so it goes"):
        meter.run([*PYTHON, "print('so it goes'); raise SystemExit(7)"], os.environ, tmp_path / "log")
    with pytest.raises(RunFailed, match="ended with status 137"):
        meter.run([*PYTHON, "import os; os.kill(os.getpid(), 9)"], os.environ, tmp_path / "log")


def gone(pid: int) -> bool:
    """Within five seconds."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def told_pid(path: Path) -> int:
    """The number that a command writes into ``path``."""
    while not (path.is_file() and path.read_text()):
        time.sleep(0.02)
    return int(path.read_text())


SLEEPER = "import os, pathlib, time; pathlib.Path({path!r}).write_text(str(os.getpid())); time.sleep(60)"


def test_a_command_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    command = [*PYTHON, SLEEPER.format(path=str(tmp_path / "pid"))]
    with pytest.raises(RunFailed, match="did not end in 1 s"):
        meter.run(command, os.environ, tmp_path / "log", timeout=1)
    assert gone(told_pid(tmp_path / "pid"))


POLITE = (
    "import pathlib, signal, sys, time\n"
    "def end(*_): time.sleep(0.2); pathlib.Path({path!r}).write_text('saved'); sys.exit(143)\n"
    "signal.signal(signal.SIGTERM, end)\n"
    "pathlib.Path({pid!r}).write_text(str(__import__('os').getpid()))\n"
    "time.sleep(60)"
)


def test_a_command_may_end_by_itself_where_it_gets_the_time(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    for grace, there in ((0.0, False), (30.0, True)):
        pid = tmp_path / f"pid-{grace}"
        command = [*PYTHON, POLITE.format(path=str(saved), pid=str(pid))]
        with pytest.raises(RunFailed, match="did not end"):
            meter.run(command, os.environ, tmp_path / "log", timeout=2, grace=grace)
        assert gone(told_pid(pid)) and saved.exists() is there


def test_a_command_ends_with_whoever_asked_for_it(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    asks = [sys.executable, "-S", meter.__file__, str(tmp_path / "m.json"), *PYTHON, SLEEPER.format(path=str(told))]
    parent = subprocess.Popen([*PYTHON, f"import subprocess; subprocess.run({asks!r})"])
    pid = told_pid(told)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert gone(pid)
