"""Files as people have them, and as they break."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from data import files
from data.files import parse, read_rows, scan, write_rows, write_text
from data.turns import Refusal
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
    with pytest.raises(ValueError, match=r"line 2: not JSON.*cut short"):
        list(read_rows(path))
    path.write_bytes(gzip.compress(LINES[0].encode() * 50)[:-12])
    with pytest.raises(ValueError, match="damaged gzip"):
        list(read_rows(path))
    with pytest.raises(FileNotFoundError, match="no data file"):
        list(read_rows(tmp_path / "none"))


def scanned(path: Path) -> list[tuple[int, Any]]:
    """Numbers and rows; a refusal as its reason."""
    rows = ((number, parse(raw)) for number, raw in scan(path))
    return [(number, row.reason if isinstance(row, Refusal) else row) for number, row in rows]


def test_damaged_rows_are_refused_in_their_place(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(b"\n".join([LINES[0].encode(), b"{", b"\xff", LINES[1].encode(), LINES[1].encode()[:-9]]))
    assert scanned(path) == [(1, ROWS[0]), (2, "not JSON"), (3, "not JSON"), (4, ROWS[1]), (5, "not JSON")]
    path.write_text(json.dumps(ROWS, indent=1)[:-30])
    assert scanned(path) == [(1, ROWS[0]), (2, "not JSON")]
    path.write_text(f"[{LINES[0]}, {LINES[1]}")
    assert scanned(path) == [(1, ROWS[0]), (2, ROWS[1]), (3, "not JSON")]
    path.write_text(f"[{LINES[0]} {LINES[1]}]\n")
    assert scanned(path) == [(1, ROWS[0]), (2, "not JSON")]
    path.write_text(f"[\n{LINES[0]}]\nmore")
    assert scanned(path) == [(1, ROWS[0]), (2, "not JSON")]
    for empty in (b"", b"\n \n", b"\xef\xbb\xbf", b"[]"):
        path.write_bytes(empty)
        assert scanned(path) == [(0, "empty file")]
    packed = gzip.compress("\n".join(f'"{os.urandom(40).hex()}"' for _ in range(9000)).encode())
    path.write_bytes(packed[: len(packed) // 2])
    rows = scanned(path)
    assert len(rows) > 1000
    assert rows[-1][1] == "damaged file"


def test_objects_over_several_lines(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("\n".join(json.dumps(row, indent=2) for row in ROWS))
    assert scanned(tmp_path / "rows") == [(1, ROWS[0]), (2, ROWS[1])]


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_arrays_are_read_piece_by_piece(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, piece: int) -> None:
    monkeypatch.setattr(files, "_PIECE", piece)
    rows = [{"a": "é\u2028" * 30}, [1, 2.5e3, -7], "x]", None, 12345, {"b": [{"c": "\U0001f600"}]}]
    for indent in (None, 3):
        (tmp_path / "rows").write_text("\n" + json.dumps(rows, indent=indent))
        assert scanned(tmp_path / "rows") == list(enumerate(rows, 1))


def test_lone_surrogates_are_read(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text(r'{"text": "a\ud83d"}')
    assert scanned(tmp_path / "rows") == [(1, {"text": "a\ud83d"})]
    (tmp_path / "rows").write_bytes(b'[\n{"text": "a\xff"}]')
    assert scanned(tmp_path / "rows") == [(1, {"text": "a\udcff"})]


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
