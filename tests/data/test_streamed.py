"""A long file is streamed: what memory preparing takes does not grow with it. The small version of the script."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from data.files import scan
from data.prepare import prepare
from tests.data import streamed, toys


def test_the_script_prints_rate_and_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["streamed.py", "--rows", "300", "--processes", "1", "--limit"]
    monkeypatch.setattr(sys, "argv", [*command, "1000"])
    streamed.main()
    assert re.fullmatch(r"300 rows, \d MB: \d+ rows/s, at most \d+\.\d\d GB of memory\n", capsys.readouterr().out)
    monkeypatch.setattr(sys, "argv", [*command, "0.001"])
    with pytest.raises(SystemExit, match=r"more than 0\.001 GB"):
        streamed.main()


class Counted(bytes):
    """A line that counts how many of its kind there are."""

    alive = 0
    most = 0

    def __new__(cls, line: bytes) -> Counted:
        cls.alive += 1
        cls.most = max(cls.most, cls.alive)
        return super().__new__(cls, line)

    def __del__(self) -> None:
        Counted.alive -= 1


def test_no_more_rows_are_held_than_two_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "rows"
    streamed.write_long_file(source, 200)
    whole = scan

    def counted(path: Path) -> Iterator[tuple[int, bytes]]:
        return ((number, Counted(line)) for number, line in whole(path))

    monkeypatch.setattr("data.sources.scan", counted)
    report = prepare([source], toys.tokenizer(), tmp_path / "out", processes=1, chunk=8)
    assert (report.kept, Counted.alive) == ({"train": 200}, 0)
    assert 8 <= Counted.most <= 17
