"""What a person sees of a run: a bar with rate and time left on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_SECONDS = 15.0  # between lines where there is no terminal


def duration(seconds: float) -> str:
    """``m:ss``, or ``h:mm:ss``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


class Reporter:
    """Writes to standard error, on the main process only."""

    def __init__(self, main: bool, file: IO[str] | None = None) -> None:
        self.main = main
        self.console = Console(file=file or sys.stderr, quiet=not main, soft_wrap=True, highlight=False, markup=False)

    def say(self, text: str) -> None:
        """A line, above a running bar if there is one."""
        self.console.print(text)

    def bar(self, what: str, total: int, unit: str, done: int = 0) -> Bar:
        """A context that shows how ``total`` units get done; ``done`` of them were done before."""
        return Bar(self, what, total, unit, done)


class Bar:
    """See :meth:`Reporter.bar`. On a terminal a live bar, elsewhere sparse lines."""

    def __init__(self, reporter: Reporter, what: str, total: int, unit: str, done: int) -> None:
        self.reporter, self.what, self.total, self.unit, self.first = reporter, what, total, unit, done
        self.started = self.spoke = time.monotonic()
        self.live: Progress | None = None
        if reporter.main and reporter.console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[unit]}  {task.fields[rate]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            self.live = Progress(*columns, console=reporter.console, transient=True)
            self.task = self.live.add_task(what, total=total, completed=done, unit=unit, rate="")

    def __enter__(self) -> Bar:
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.live.stop()

    def left(self, done: int) -> float:
        """Seconds until the end at the rate so far."""
        passed = time.monotonic() - self.started
        return passed / max(1, done - self.first) * (self.total - done)

    def update(self, done: int, rate: str = "") -> None:
        """``done`` units are done; without a terminal this speaks every ``LINE_SECONDS`` only."""
        if self.live:
            self.live.update(self.task, completed=done, rate=rate)
        elif time.monotonic() - self.spoke >= LINE_SECONDS and done < self.total:
            self.spoke = time.monotonic()
            share = f"{self.what}: {done}/{self.total} {self.unit}"
            self.reporter.say(f"{share}  {rate}{'  ' if rate else ''}{duration(self.left(done))} left")

    def quiet(self) -> None:
        """The caller has just said how far it is: no line for a while."""
        self.spoke = time.monotonic()
