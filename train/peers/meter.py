"""Runs a command to its end and says how much memory it held at most; a small process of its own stands between.

A process's peak is at first that of the one it was started from, so that whatever a large program starts seems large.
This file, run as a script, is the small one in between; it uses the standard library alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
POLL = 0.1  # seconds between looks


class Metered(NamedTuple):
    """What a command took: seconds from its start to its end, seconds of processors, bytes resident at most."""

    seconds: float
    processor: float
    peak: int


class RunFailed(OSError):
    """The command ended with an error; the message has the end of what it wrote."""


def run(
    command: Sequence[str], environ: Mapping[str, str], log: Path, timeout: float | None = None, grace: float = 0.0
) -> Metered:
    """Run ``command`` with ``environ`` alone, its output going to ``log``.

    Args:
        grace: seconds that it gets to end by itself where this process is stopped, before it is killed.

    Raises:
        RunFailed: it ended with another status than 0, or not in ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory() as scratch, log.open("w", encoding="utf-8") as out:
        told = Path(scratch) / "metered.json"
        words = [sys.executable, "-S", "-E", __file__, str(told), *command]
        between = subprocess.Popen(
            words, env=dict(environ), stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            status = between.wait(timeout)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"{_named(command)} did not end in {timeout:.0f} s; it wrote {log}") from None
        finally:
            if between.poll() is None:
                _end(between, grace)
        if status:
            end = log.read_text(encoding="utf-8", errors="replace")[-1500:].strip()
            raise RunFailed(f"{_named(command)} ended with status {status}; the end of {log}: {end}")
        return Metered(**json.loads(told.read_text(encoding="utf-8")))


def _end(process: subprocess.Popen[bytes], grace: float) -> None:
    """End it and all that it started: asked first where there is time for that."""
    if grace:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _named(command: Sequence[str]) -> str:
    return " ".join(command[:4])


def main(told: str, command: list[str]) -> int:
    """Start ``command``, wait for it, and write what it took to ``told``; it ends when whoever asked is gone."""
    began, parent = time.perf_counter(), os.getppid()
    process = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: None)  # the command is told too, and when it ends, this does
    while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
        if os.getppid() != parent:
            process.kill()
        time.sleep(POLL)
    _, status, usage = ended
    code = os.waitstatus_to_exitcode(status)
    found = {
        "seconds": time.perf_counter() - began,
        "processor": usage.ru_utime + usage.ru_stime,
        "peak": usage.ru_maxrss * UNIT,
    }
    Path(told).write_text(json.dumps(found), encoding="utf-8")
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
