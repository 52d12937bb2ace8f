"""How far long work is: one line that moves on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import IO, TypeVar

Item = TypeVar("Item")


def progress(
    items: Iterable[Item], total: int, label: str, *, file: IO[str] | None = None, every: float = 30.0
) -> Iterator[Item]:
    """Yield ``items`` and say on ``file`` (standard error by default) how many of ``total`` are done.

    Args:
        every: seconds between lines where ``file`` is no terminal; work shorter than that says nothing there.
    """
    file = sys.stderr if file is None else file
    live = file.isatty()
    started = said = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if live or (now - said >= every and done < total):
            said = now
            left = (now - started) / done * (total - done)
            line = f"{label}: {done}/{total}, {left:.0f} s left"
            file.write(f"\r{line}\x1b[K" if live else f"{line}\n")
            file.flush()
    if live:
        file.write("\r\x1b[K")
        file.flush()
