"""Conversations → a dataset on disk (Arrow) that training reads, with its provenance and a report.

    OUT/train/            datasets.Dataset: id, input_ids, loss_mask, finished
    OUT/heldout/          the same, when a part is held out
    OUT/provenance.json   what determines the content (sources by hash, tokenizer, template, limits), and what made it
    OUT/report.json       what was kept, cut and dropped, and why

Rows are read one by one, prepared in chunks by several processes, and put together in their order; a stopped run
goes on where it was. The folder is made beside its place and renamed when whole. Unchanged settings and sources: it
is used again. Anything changed: it is made anew. A folder that holds anything else is left alone.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]

from data.files import read_record
from data.folder import PROVENANCE, REPORT, WHOLE, claimed, place, sweep, working
from data.parts import Chunk, Part, PartWriter, write_parts
from data.report import PrepareReport, reasons
from data.roles import checked_roles
from data.sources import Source, open_sources
from data.split import split

FORMAT = 2
CHUNK = 256
"""Rows of a part."""
ALONE = 32_000_000
"""Bytes of data up to which starting other processes takes longer than it saves."""
MOST_PROCESSES = 16

Progress = Callable[[str, int, int], None]
"""Told the stage, how many rows are done, and of how many (0: unknown)."""


def tokenizer_hash(tokenizer: Any) -> str:
    """Hash of what a tokenizer does, template apart: vocabulary, merges, normalizers; not its padding state."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        state = {"vocab": tokenizer.get_vocab()}
    else:
        state = json.loads(fast.to_str())
        state.pop("padding", None)
        state.pop("truncation", None)
    state["class"], state["special"] = type(tokenizer).__name__, sorted(map(str, tokenizer.all_special_tokens))
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def prepare(
    sources: Sequence[str | os.PathLike[str]],
    tokenizer: Any,
    out: str | os.PathLike[str],
    max_length: int = 1024,
    heldout: float = 0,
    seed: int = 0,
    *,
    roles: Mapping[str, str] | None = None,
    processes: int | None = None,
    chunk: int = CHUNK,
    progress: Progress = lambda stage, done, total: None,
) -> PrepareReport:
    """Write the dataset folder ``out`` from conversations.

    Args:
        sources: files (JSON, JSON lines, parquet, CSV; gzipped or not), folders of them, or data sets on the Hub, see
            :func:`data.sources.open_sources`.
        tokenizer: the target's, with its chat template (plain text does without).
        max_length: most tokens a sequence may have; the rest is cut away and counted.
        heldout: fraction (below 1) or count of conversations to hold out by the rule of :mod:`data.overlap`; 0: none.
        seed: chooses what is held out.
        roles: further names of roles → system, user, assistant or tool.
        processes: that prepare at once; by default one for little data, else as many as there are cores (16 at most).
        chunk: rows prepared together; the result does not depend on it.

    Raises:
        FileNotFoundError: a source is missing.
        ValueError: no row is usable, the template shows no answer, or ``out`` holds files that preparing did not
            write. Nothing is written or deleted then.
        OSError: the disk is full, or another run is preparing ``out``; what was prepared is kept for the next run.
    """
    out = Path(out) if Path(out).name not in ("", "..") else Path(out).resolve()
    for name, value in (
        ("max_length", max_length),
        ("chunk", chunk),
        ("processes", 1 if processes is None else processes),
    ):
        if value < 1:
            raise ValueError(f"{name} is {value}, it must be 1 or more")
    if not out.name:
        raise ValueError(f"{out} cannot be the folder of prepared data: name another folder")
    names = checked_roles(roles or {})
    opened = open_sources(sources)
    key = {
        "format": FORMAT,
        "sources": [source.content for source in opened],
        "tokenizer": tokenizer_hash(tokenizer),
        "template": _hash(tokenizer.chat_template),
        "max_length": max_length,
        "heldout": heldout,
        "seed": seed,
        "roles": dict(sorted((roles or {}).items())),
    }
    found = claimed(out)
    made = _report_of(out) if found is not None and found.get("key") == key else None
    if made is not None:
        sweep(out)
        return made
    work_key = _hash([key, chunk])[:16]
    out.parent.mkdir(parents=True, exist_ok=True)
    sweep(out, keep=work_key)
    with working(out, work_key) as work:
        writer = PartWriter(work, tokenizer, names, max_length, bool(heldout))
        report = PrepareReport()
        parts = _parts(writer, opened, chunk, processes or _processes(opened), report, progress)
        _assemble(work / WHOLE, parts, heldout, seed, report, opened)
        told = json.dumps(asdict(report), indent=2, ensure_ascii=False) + "\n"
        (work / WHOLE / REPORT).write_text(told, encoding="utf-8")
        provenance = {"key": key, "made_with": _versions()}
        (work / WHOLE / PROVENANCE).write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")
        place(work / WHOLE, out)
    return report


def _report_of(out: Path) -> PrepareReport | None:
    """Of the dataset that stands there, to be used again; None where it is damaged, so that all is made anew."""
    try:
        return PrepareReport(**read_record(out / REPORT) | {"reused": True})
    except (OSError, ValueError, TypeError):
        return None


def _processes(sources: Sequence[Source]) -> int:
    sizes = [ALONE if source.bytes is None else source.bytes for source in sources]
    return 1 if sum(sizes) < ALONE else min(os.cpu_count() or 1, MOST_PROCESSES)


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("datasets", "tokenizers", "transformers")}


def _chunks(sources: Sequence[Source], size: int) -> Iterator[Chunk]:
    rows = ((f"{source.name}:{number}", row) for source in sources for number, row in source.rows())
    while chunk := list(itertools.islice(rows, size)):
        yield chunk


def _parts(
    writer: PartWriter,
    sources: Sequence[Source],
    size: int,
    processes: int,
    report: PrepareReport,
    progress: Progress,
) -> list[Part]:
    """All parts in order, those made now and those that were there; ``report`` is their sum."""
    number = 0

    def missing() -> Iterator[tuple[int, Chunk]]:
        nonlocal number
        for index, chunk in enumerate(_chunks(sources, size)):
            number = index + 1
            if writer.done(index):
                report.resumed += len(chunk)
            else:
                yield index, chunk

    made = 0
    for rows in write_parts(writer, missing(), processes):
        made += rows
        progress("rows", report.resumed + made, 0)
    parts = [writer.read(index) for index in range(number)]
    for part in parts:
        report.add(part.report)
    return parts


def _assemble(
    folder: Path, parts: Sequence[Part], heldout: float, seed: int, report: PrepareReport, sources: Sequence[Source]
) -> None:
    """The parts as the splits of one dataset folder.

    Raises:
        ValueError: nothing was kept, or too little to hold out that much of it.
    """
    if not report.kept.get("train"):
        first = f"; the first is {report.refused[0]}" if report.refused else ""
        where = ", ".join(source.name for source in sources)
        raise ValueError(f"no usable row in {where} ({reasons(report.dropped)}){first}")
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped here
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        whole = datasets.concatenate_datasets([datasets.Dataset.from_file(str(p.arrow)) for p in parts if p.arrow])
        if heldout:
            for name, rows in _sides(parts, heldout, seed, report).items():
                whole.select(rows).save_to_disk(str(folder / name))
        else:
            whole.save_to_disk(str(folder / "train"))
    finally:
        if shown:
            datasets.enable_progress_bars()


def _sides(parts: Sequence[Part], heldout: float, seed: int, report: PrepareReport) -> dict[str, list[int]]:
    """Rows of the dataset on each side of a split of the conversations."""
    prompts = [prompt for part in parts for prompt in part.prompts]
    starts = list(itertools.accumulate((size for part in parts for size in part.sizes), initial=0))
    chosen = split(prompts, heldout, seed)
    report.split = chosen.describe(prompts)
    sides = {"train": chosen.train, "heldout": chosen.heldout}
    report.kept = {name: len(places) for name, places in sides.items()}
    return {name: [r for i in places for r in range(starts[i], starts[i + 1])] for name, places in sides.items()}


def load(folder: str | os.PathLike[str], split: str = "train") -> datasets.Dataset:
    """One split of a prepared folder.

    Columns: ``id`` (str; with ``#turn`` behind it for the earlier sequences of a conversation that has several),
    ``input_ids`` (list of int32), ``loss_mask`` (list of bool), ``finished`` (bool).

    Raises:
        FileNotFoundError: the folder is missing or was not made by :func:`prepare`, or has no such split.
    """
    folder = Path(folder)
    if not (folder / PROVENANCE).is_file():
        raise FileNotFoundError(f"{folder} is no prepared dataset: make one with `headstart data prepare`")
    if not (folder / split).is_dir():
        there = sorted(path.name for path in folder.iterdir() if path.is_dir())
        raise FileNotFoundError(f"{folder} has no split {split!r} (it has: {', '.join(there)})")
    return datasets.load_from_disk(str(folder / split))
