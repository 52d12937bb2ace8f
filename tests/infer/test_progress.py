"""Progress: everything comes through, a terminal sees one moving line, a log a line now and then."""

from __future__ import annotations

import io

from infer.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_items_come_through_and_a_terminal_is_left_clean() -> None:
    file = Terminal()
    assert list(progress("abc", 3, "reading", file=file)) == ["a", "b", "c"]
    shown = file.getvalue()
    assert "reading: 2/3" in shown and shown.endswith("\r\x1b[K") and "\n" not in shown


def test_a_log_is_spared_short_work_and_told_of_long_work() -> None:
    short, long = io.StringIO(), io.StringIO()
    list(progress(range(3), 3, "reading", file=short))
    list(progress(range(3), 3, "reading", file=long, every=0.0))
    assert short.getvalue() == ""
    assert [line.split(",")[0] for line in long.getvalue().splitlines()] == ["reading: 1/3", "reading: 2/3"]
