"""Files as people have them, and as they break."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from data.files import read_rows, write_rows, write_text
from tests.data.toys import chat

ROWS = [{"messages": chat("hi", "ok")}, {"messages": chat("a\u2028b", "é")}]
LINES = [json.dumps(row, ensure_ascii=False) for row in ROWS]


@pytest.mark.parametrize(
    "raw",
    [
        "\n".join(LINES).encode(),
        json.dumps(ROWS, indent=1).encode(),
        b"\xef\xbb\xbf" + "\n".join(LINES).encode(),
        b"\xef\xbb\xbf" + json.dumps(ROWS).encode(),
        "\r\n".join(LINES).encode() + b"\r\n",
        ("\n\n" + "\n \n".join(LINES) + "\n\n").encode(),
        gzip.compress("\n".join(LINES).encode()),
    ],
)
def test_same_rows_from_every_spelling(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "rows").write_bytes(raw)
    assert [row for _, row in read_rows(tmp_path / "rows")] == ROWS


def test_arrays_of_messages(tmp_path: Path) -> None:
    bare = [row["messages"] for row in ROWS]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(bare))
    assert list(read_rows(path)) == [(1, bare[0]), (2, bare[1])]
    path.write_text("\n".join(json.dumps(row) for row in bare))
    assert list(read_rows(path)) == [(1, bare[0]), (2, bare[1])]
    path.write_text(json.dumps(bare[0]))
    assert list(read_rows(path)) == [(1, bare[0])]


def test_damaged_and_empty_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(LINES[0] + "\n\n" + LINES[1][:20])
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 3: not JSON"):
        list(read_rows(path))
    for empty in (b"", b"\n \n", b"\xef\xbb\xbf", b"[]"):
        path.write_bytes(empty)
        with pytest.raises(ValueError, match="is empty"):
            list(read_rows(path))
    path.write_text(json.dumps(ROWS)[:-20])
    with pytest.raises(ValueError, match="line 1: not JSON"):
        list(read_rows(path))
    path.write_bytes(gzip.compress(LINES[0].encode() * 50)[:-12])
    with pytest.raises(ValueError, match="damaged gzip"):
        list(read_rows(path))
    with pytest.raises(FileNotFoundError, match="no data file"):
        list(read_rows(tmp_path / "none"))


def test_writing_is_deterministic_and_whole_or_not_at_all(tmp_path: Path) -> None:
    for name in ("one.gz", "two.gz"):
        write_rows(tmp_path / name, ROWS)
    assert (tmp_path / "one.gz").read_bytes() == (tmp_path / "two.gz").read_bytes()
    assert (tmp_path / "one.gz").read_bytes()[3:8] == bytes(5)  # no name, no time
    assert [row for _, row in read_rows(tmp_path / "one.gz")] == ROWS

    def broken():  # type: ignore[no-untyped-def]
        yield ROWS[1]
        raise OSError("disk full")

    before = (tmp_path / "one.gz").read_bytes()
    with pytest.raises(OSError, match="disk full"):
        write_rows(tmp_path / "one.gz", broken())
    assert (tmp_path / "one.gz").read_bytes() == before
    write_text(tmp_path / "note", "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["note", "one.gz", "two.gz"]
