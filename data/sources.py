"""What a user names as data → numbered rows: a file, a folder of files, or a data set on the Hub.

How a file is read follows from its name's ending (:data:`READERS`); everything else is taken for JSON. No source is
ever held in memory whole.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.files import DAMAGED, open_unpacked, scan, sha256
from data.turns import Refusal

Rows = Iterator[tuple[int, Any]]
BATCH = 256
"""Rows of a table that are decoded together."""
DATA_SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet", ".csv", ".tsv")
BOOKKEEPING = ("provenance.json", "report.json", "dataset_info.json", "state.json", "synthesis.json")
_HUB = re.compile(
    r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(/(?P<config>[\w.-]+))?(@(?P<revision>[\w.-]+))?(:(?P<split>[\w.-]+))?"
)


@dataclass(frozen=True)
class Source:
    """A place of rows.

    Attributes:
        name: stands before the row's number in ids and reports.
        rows: opens it: ``(number, row)``, a row as :func:`data.files.scan` describes it.
        content: what tells another content from this one, e.g. the file's hash.
        bytes: its size on disk; None when unknown.
    """

    name: str
    rows: Callable[[], Rows]
    content: dict[str, str]
    bytes: int | None = None


def _parquet(path: Path) -> Rows:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        yield number + 1, Refusal("damaged file", f"{path} is a damaged parquet file ({error}): get it again")
        return
    if not number:
        yield 0, Refusal("empty file", f"{path} is empty: it has no row")


def _table(delimiter: str) -> Callable[[Path], Rows]:
    def read(path: Path) -> Rows:
        csv.field_size_limit(1 << 30)
        number = 0
        try:
            with open_unpacked(path) as raw:
                text = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="")
                for number, row in _cells(csv.DictReader(text, delimiter=delimiter, strict=True)):
                    yield number, row
        except DAMAGED as error:
            yield number + 1, Refusal("damaged file", f"{path} is a damaged gzip file ({error}): get it again")
        if not number:
            yield 0, Refusal("empty file", f"{path} is empty: it has no row under its header")

    return read


def _cells(reader: csv.DictReader[str]) -> Rows:
    number = 0
    while True:
        number += 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield number, Refusal("damaged row", f"not a row of the table ({error}), near line {reader.line_num}")
            continue
        extra = (None in row) or any(value is None for value in row.values())
        yield number, Refusal("damaged row", f"line {reader.line_num} has too few or too many cells") if extra else row


READERS: dict[str, Callable[[Path], Rows]] = {".parquet": _parquet, ".csv": _table(","), ".tsv": _table("\t")}
"""Ending of a file's name (without ``.gz``) → how it is read."""


def _suffix(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def _file(path: Path, name: str) -> Source:
    read = READERS.get(_suffix(path), scan)
    return Source(name, lambda: read(path), {"name": name, "sha256": sha256(path)}, path.stat().st_size)


def _folder(folder: Path, prefix: str) -> list[Source]:
    """All data files under a folder, in the order of their names, or the rows of a saved ``datasets.Dataset``."""
    if (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file():
        return [_saved(folder)]
    if (folder / "dataset_dict.json").is_file():
        inside = ", ".join(sorted(path.parent.name for path in folder.glob("*/state.json")))
        raise ValueError(f"{folder} holds several saved data sets: name the folder of one in it ({inside})")
    found = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and _suffix(path) in DATA_SUFFIXES and path.name not in BOOKKEEPING
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not found:
        raise FileNotFoundError(f"no data file in the folder {folder} (none ends in {', '.join(DATA_SUFFIXES)})")
    return [_file(path, prefix + path.relative_to(folder).as_posix()) for path in found]


def _saved(folder: Path) -> Source:
    def rows() -> Rows:
        import datasets  # type: ignore[import-untyped]

        try:
            yield from enumerate(datasets.load_from_disk(str(folder)), 1)
        except (ValueError, OSError) as error:
            raise ValueError(f"the data set saved in {folder} is damaged ({error}): save it again") from error

    files = sorted(folder.glob("*.arrow"))
    content = {path.name: sha256(path) for path in [*files, folder / "state.json"]}
    return Source(folder.name, rows, {"name": folder.name, **content}, sum(path.stat().st_size for path in files))


def _hub(asked: str) -> Source:
    """A data set on the Hub, at the commit that its revision means now; rows come as they are downloaded."""
    match = _HUB.fullmatch(asked)
    if match is None or _suffix(Path(asked.partition(":")[0])) in DATA_SUFFIXES:
        raise FileNotFoundError(f"no data file {asked}")
    import datasets
    from huggingface_hub import HfApi

    name, config, split = match["name"], match["config"], match["split"] or "train"
    try:
        commit = HfApi().dataset_info(name, revision=match["revision"]).sha
    except Exception as error:  # whatever the network or the Hub says, it is no such data
        raise FileNotFoundError(
            f"no data file {asked}, and no data set of that name on the Hub ({type(error).__name__}: {error})"
        ) from error

    def rows() -> Rows:
        return enumerate(datasets.load_dataset(name, config, split=split, revision=commit, streaming=True), 1)

    return Source(name, rows, {"name": name, "config": config or "", "split": split, "commit": str(commit)})


def open_sources(names: Sequence[str | os.PathLike[str]]) -> list[Source]:
    """What the user named, in that order; folders become their files.

    Args:
        names: paths of files or folders, or ``ORG/NAME[/CONFIG][@REVISION][:SPLIT]`` for the Hub.

    Raises:
        FileNotFoundError: there is no such thing, or a folder has no data file.
        ValueError: nothing was named, or an empty name; or a folder holds several saved data sets.
    """
    if not names:
        raise ValueError("no data file was named")
    if not all(map(str, names)):
        raise ValueError("the name of a data file is empty: name a file, a folder, or ORG/NAME on the Hub")
    paths = [Path(name) for name in names]
    simple = [path.name for path in paths]
    sources: list[Source] = []
    for name, path in zip(names, paths, strict=True):
        if path.is_file():
            sources.append(_file(path, path.name if simple.count(path.name) == 1 else str(name)))
        elif path.is_dir():
            sources += _folder(path, f"{path.name}/" if len(paths) > 1 else "")
        else:
            sources.append(_hub(str(name)))
    return sources
