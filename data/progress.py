"""How long work is told about while it goes on."""

from __future__ import annotations

import sys
import time


class Progress:
    """Progress on stderr with rate and time left: one living line on a terminal, a line now and then in a log."""

    def __init__(self, pause: float = 30.0) -> None:
        self._terminal = sys.stderr.isatty()
        self._pause = 0.2 if self._terminal else pause
        self._stage, self._begun, self._first, self._told = "", 0.0, 0, 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._begun, self._first, self._told = stage, now, done, 0.0
        if now - self._told < self._pause and done != total:
            return
        self._told = now
        rate = (done - self._first) / max(now - self._begun, 1e-9)
        left = f", {(total - done) / rate / 60:.0f} min left" if total and rate > 0 and done < total else ""
        line = f"{stage} {done}{f'/{total}' if total else ''}" + (f", {rate:.1f}/s{left}" if rate > 0 else "")
        ends = "\n" if not self._terminal or done == total else ""
        print(("\r\033[K" if self._terminal else "") + line, end=ends, file=sys.stderr, flush=True)
