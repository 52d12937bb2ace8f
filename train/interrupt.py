"""Ctrl-C, SIGTERM, a launcher that died: noticed between optimizer steps, so that a checkpoint can be written first."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any


class Interrupted(Exception):
    """The run was asked to stop, and did.

    Attributes:
        number: the signal.
        exit_status: what a shell expects of a process that ended so: 128 + signal.
    """

    def __init__(self, number: int, step: int, checkpoint: Path) -> None:
        self.number, self.exit_status = number, 128 + number
        name = signal.Signals(number).name
        super().__init__(
            f"stopped by {name} after step {step}; checkpoint written to {checkpoint}. "
            "Run the same command again to go on from there"
        )


class Terminated(KeyboardInterrupt):
    """SIGTERM, as an exception like Ctrl-C's: what is half done is cleaned up on the way out."""

    exit_status = 128 + signal.SIGTERM


def terminate(number: int, frame: FrameType | None) -> None:
    """Signal handler for what runs outside the training steps."""
    raise Terminated


LAUNCHERS = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")  # what each sets for the processes that it starts
PR_SET_PDEATHSIG = 1  # prctl(2)


def launched() -> bool:
    """Whether a launcher started this process: without it, nobody waits for the run."""
    return any(name in os.environ for name in LAUNCHERS)


def follow_launcher() -> None:
    """Have the system send SIGTERM when the launcher dies, whatever killed it: else its processes would train on, and
    hold the run's folder. On Linux; elsewhere :class:`StopRequest` finds out between steps."""
    if launched() and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


ECHO = 10.0  # seconds in which a SIGTERM is taken for the stop that was noted already


class StopRequest:
    """Context in which SIGINT and SIGTERM are only noted; a second one does what it usually does.

    A SIGTERM close behind the first signal is the same request, heard twice, and no second one: a scheduler signals
    launcher and processes alike, and the launcher passes on what it got; one that Ctrl-C ends sends SIGTERM by its end.

    That a launcher died is noted as a SIGTERM too: ``accelerate launch`` with one process does not pass that on, and
    nobody passes SIGKILL on.

    Attributes:
        number: the signal that came, 0 for none.
    """

    NUMBERS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self._number, self._since = 0, 0.0
        self._before: dict[int, Any] = {}
        self._parent = os.getppid() if launched() else None

    @property
    def number(self) -> int:
        """See the class."""
        if not self._number and self._parent is not None and os.getppid() != self._parent:
            self._heard(signal.SIGTERM)
        return self._number

    def _heard(self, number: int) -> None:
        self._number, self._since = number, time.monotonic()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._number:
            self._heard(number)
            signal.signal(signal.SIGINT, self._before[signal.SIGINT])
        elif number != signal.SIGTERM or time.monotonic() - self._since > ECHO:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._note) for number in self.NUMBERS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
