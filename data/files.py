"""JSON files of conversations → numbered rows, one at a time: lines or one array, gzipped or not, BOM or none.

A damaged row is a :class:`Refusal` in its place, with its number, and the rows behind it still come.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import itertools
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from data.stream import elements, values
from data.turns import Refusal

_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
_LONGEST = 1 << 26
"""Bytes of a first line beyond which the file is taken for one array: no conversation is 64 MB long."""
_PIECE = 1 << 20

DAMAGED = (EOFError, gzip.BadGzipFile, zlib.error)


def sha256(path: Path) -> str:
    """Hex digest of a file as it lies on disk."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_unpacked(path: Path) -> IO[bytes]:
    """The file's bytes; gzip is known by its first two bytes, not by its name."""
    with path.open("rb") as file:
        packed = file.read(2) == _GZIP
    return gzip.open(path, "rb") if packed else path.open("rb")  # type: ignore[return-value]


def scan(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield ``(number, row)``: the line's number in a JSON-lines file, the place from 1 in an array.

    A row is ``bytes`` (a line that :func:`parse` has not read yet, so that a worker can), a decoded value, or a
    refusal. A file whose first character is ``[`` is read as one array when it is one (an array of messages is one
    conversation), else as JSON lines. Blank lines are passed over. An empty file is one refusal with the number 0.
    """
    number = 0
    try:
        with open_unpacked(path) as file:
            for number, row in _rows(path, file):
                yield number, row
    except DAMAGED as error:
        yield number + 1, Refusal("damaged file", f"{path} is a damaged gzip file ({error}): get it again")


def _rows(path: Path, file: IO[bytes]) -> Iterator[tuple[int, Any]]:
    lines = ((n, line) for n, line in enumerate(iter(lambda: file.readline(_LONGEST), b""), 1))
    plain = ((n, line.removeprefix(_BOM) if n == 1 else line) for n, line in lines)
    written: Iterator[tuple[int, bytes]] = ((n, line) for n, line in plain if line.strip())
    first = next(written, None)
    if first is None:
        yield 0, Refusal("empty file", f"{path} is empty: it has no row")
        return
    head = first[1].lstrip()
    rest: Iterator[bytes] = iter(lambda: file.read(_PIECE), b"")
    if head.strip() == b"{":  # an object over several lines
        yield from enumerate(values(_decoded(itertools.chain([head], rest))), 1)
        return
    if head.startswith(b"["):
        second = None if _is_long(first[1]) or not _is_json(head) else next(written, None)
        if second is None:
            yield from _array(path, elements(_decoded(itertools.chain([head], rest))))
            return
        written = itertools.chain([second], written)
    yield from itertools.chain([first], written)


def _is_long(line: bytes) -> bool:
    return len(line) >= _LONGEST


def _is_json(line: bytes) -> bool:
    return not isinstance(parse(line), Refusal)


def _decoded(pieces: Iterable[bytes]) -> Iterator[str]:
    """Text of pieces of bytes; bytes that are no UTF-8 become lone surrogates, which are mended and counted later."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    for piece in pieces:
        yield decoder.decode(piece)
    yield decoder.decode(b"", final=True)


def _array(path: Path, rows: Iterator[Any]) -> Iterator[tuple[int, Any]]:
    first = next(rows, None)
    if first is None:
        yield 0, Refusal("empty file", f"{path} is empty: it has no row")
    elif isinstance(first, Mapping) and ("role" in first or "from" in first):
        messages = [first, *rows]
        yield 1, next((message for message in messages if isinstance(message, Refusal)), messages)
    else:
        yield from enumerate(itertools.chain([first], rows), 1)


def parse(row: Any) -> Any:
    """A row as :func:`scan` gives it, decoded; a line that is not JSON is a refusal."""
    if not isinstance(row, bytes):
        return row
    try:
        return json.loads(row.decode())
    except (ValueError, RecursionError) as error:
        return Refusal("not JSON", f"not JSON ({error}); is the file cut short?")


def read_rows(path: str | os.PathLike[str]) -> Iterator[tuple[int, Any]]:
    """Decoded rows of a JSON file that must be whole, numbered as :func:`scan` numbers them.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is empty or damaged, or a row is not JSON.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no data file {path}")
    for number, raw in scan(path):
        row = parse(raw)
        if isinstance(row, Refusal):
            where = f"{path}, line {number}: " if row.reason == "not JSON" else ""
            raise ValueError(f"{where}{row}")
        yield number, row


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write to; renamed to it at the end, removed if writing fails."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_record(path: Path) -> dict[str, Any]:
    """The JSON object that a file of ours holds.

    Raises:
        ValueError: it holds something else, or is damaged.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}): name another folder") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged (it holds no JSON object): name another folder")
    return found


def write_text(path: Path, text: str) -> None:
    """Write beside the place and rename, so that a reader never sees half a file."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON lines, gzipped; the same rows give the same bytes (no name and no time in the header)."""
    with replacing(path) as partial, partial.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as file:
        for row in rows:
            file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
