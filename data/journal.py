"""A folder in which rows grow line by line: whose it is, and how a stopped run finds them again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data.files import parse, read_record, write_text


def read_journal(path: Path, *keys: str) -> list[dict[str, Any]]:
    """Rows of a growing file; a half-written last line (a killed run's) is cut away.

    Args:
        keys: what every row has.

    Raises:
        ValueError: a whole line is no such row, so something else wrote it.
    """
    return [row for _, row in journal_rows(path, *keys)]


def journal_rows(path: Path, *keys: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each row with where its line begins in the file, one at a time; see :func:`read_journal`."""
    if not path.is_file():
        return
    at = 0
    with path.open("r+b") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                file.truncate(at)
                return
            row = parse(line)
            if not isinstance(row, dict) or not row.keys() >= set(keys):
                raise ValueError(f"{path}, line {number}: no row that was written here; name another folder")
            yield at, row
            at += len(line)


def append(path: Path, rows: Sequence[Mapping[str, Any]], *, sync: bool = True) -> None:
    """Add rows at the end of the file; with ``sync`` they are on the disk when this returns."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        if sync:
            file.flush()
            os.fsync(file.fileno())


def claim(folder: Path, record: str, made_by: str, settings: Mapping[str, Any], may_change: Iterable[str] = ()) -> None:
    """Make the folder this run's own, or check that it already is.

    Args:
        record: name of the file that holds the settings.
        made_by: the job, as the error message calls it.
        settings: what determines the rows.
        may_change: of them, those that a continued run may set otherwise.

    Raises:
        ValueError: the folder is a file, holds something else, or was begun with other settings.
    """
    path = folder / record
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: name a folder for what is written")
    if path.is_file():
        found = read_record(path).get("settings")
        if not isinstance(found, Mapping):
            raise ValueError(f"{path} has no settings, so it was not made by {made_by}: name another folder")
        changed = sorted(k for k in settings if found.get(k) != settings[k] and k not in may_change)
        if changed:
            raise ValueError(
                f"{folder} was begun with other settings ({', '.join(f'{k}={found.get(k)!r}' for k in changed)}): "
                "name another folder, or the same settings"
            )
    elif folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty and was not made by {made_by}: name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({"settings": dict(settings)}, indent=2) + "\n")
