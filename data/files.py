"""Files of conversations → numbered rows: JSON lines or one JSON array, gzipped or not, with or without a BOM."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"


def sha256(path: Path) -> str:
    """Hex digest of a file as it lies on disk."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _open(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        packed = file.read(2) == _GZIP
    return gzip.open(path, "rb") if packed else path.open("rb")  # type: ignore[return-value]


def read_rows(path: str | os.PathLike[str]) -> Iterator[tuple[int, Any]]:
    """Yield ``(number, row)``; the number is the line in a JSON-lines file, the place from 1 in an array.

    A file whose first character is ``[`` is read as one array when it is one (an array of messages is one
    conversation), else as JSON lines. Blank lines are passed over.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is empty, or a line is not JSON (it is named: a half-written line means a damaged file).
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no data file {path}")
    try:
        with _open(path) as file:
            lines = ((n, line) for n, line in enumerate(file, 1) if line.removeprefix(_BOM).strip())
            first = next(lines, None)
            if first is None:
                raise ValueError(f"{path} is empty: it has no row")
            if first[1].removeprefix(_BOM).lstrip().startswith(b"["):
                array = _array(path)
                if array is not None:
                    yield from enumerate(array, 1)
                    return
            yield first[0], _parse(path, *first)
            for number, line in lines:
                yield number, _parse(path, number, line)
    except (EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is a damaged gzip file ({error}): get it again") from error


def _array(path: Path) -> list[Any] | None:
    """The rows of a file that is one JSON array, or None for JSON lines that happen to begin with one."""
    with _open(path) as file:
        raw = file.read().removeprefix(_BOM)
    try:
        rows = json.loads(raw)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # a first line that is whole by itself
            return None
        raise ValueError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from error
    if not rows:
        raise ValueError(f"{path} is empty: it has no row")
    if all(isinstance(row, Mapping) and ("role" in row or "from" in row) for row in rows):
        return [rows]
    return list(rows)


def _parse(path: Path, number: int, line: bytes) -> Any:
    try:
        return json.loads(line.removeprefix(_BOM))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error}); is the file cut short?") from error


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write to; renamed to it at the end, removed if writing fails."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write beside the place and rename, so that a reader never sees half a file."""
    with _replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON lines, gzipped; the same rows give the same bytes (no name and no time in the header)."""
    with _replacing(path) as partial, partial.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as file:
        for row in rows:
            file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
