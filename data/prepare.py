"""Files of conversations → a dataset on disk (Arrow) that training reads, with its provenance and a report.

    OUT/train/            datasets.Dataset: id, input_ids, loss_mask, finished
    OUT/heldout/          the same, when a part is held out
    OUT/provenance.json   what determines the content: sources by hash, tokenizer, template, limits
    OUT/report.json       what was kept, cut and dropped, and why

The folder is made beside its place and renamed when whole. Unchanged settings and sources: it is used again.
Anything changed: it is made anew. A folder that holds anything else is left alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
from datasets.arrow_writer import ArrowWriter  # type: ignore[import-untyped]

from data.conversation import Conversation, Refusal, read_conversation
from data.files import read_rows, sha256
from data.folder import PROVENANCE, REPORT, beside, claimed, place
from data.render import Renderer
from data.split import split

FORMAT = 1
SHOWN = 20
"""Refused rows that the report quotes."""
STEP = 500
"""Conversations between two reports of progress."""

FEATURES = datasets.Features(
    {
        "id": datasets.Value("string"),
        "input_ids": datasets.List(datasets.Value("int32")),
        "loss_mask": datasets.List(datasets.Value("bool")),
        "finished": datasets.Value("bool"),
    }
)

Progress = Callable[[str, int, int], None]
"""Told the split, how many of its conversations are done, and of how many (0: unknown)."""


@dataclass
class PrepareReport:
    """What became of the rows.

    Attributes:
        rows: rows read.
        kept: conversations written, by split.
        dropped: rows not written, by reason.
        refused: the first of them, as ``file:row: what was wrong``.
        cut: kept conversations that ended beyond ``max_length``.
        unfinished: kept conversations whose last answer is not whole (by their own word, or cut).
        orphans: assistant's turns dropped from the front of a conversation.
        tokens: tokens written.
        supervised: those of them that the loss mask covers.
        split: the closest pair across the split, when a part is held out.
        reused: the folder was there already, made by the same settings from the same sources.
    """

    rows: int = 0
    kept: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    cut: int = 0
    unfinished: int = 0
    orphans: int = 0
    tokens: int = 0
    supervised: int = 0
    split: dict[str, Any] | None = None
    reused: bool = False

    def drop(self, where: str, refusal: Refusal) -> None:
        """Count a refused row, and quote it if it is among the first."""
        self.dropped[refusal.reason] = self.dropped.get(refusal.reason, 0) + 1
        if len(self.refused) < SHOWN:
            self.refused.append(f"{where}: {refusal}")


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


def _provenance(sources: Sequence[Path], tokenizer: Any, max_length: int, heldout: float, seed: int) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "sources": [{"name": path.name, "sha256": sha256(path)} for path in sources],
        "tokenizer": tokenizer_hash(tokenizer),
        "template": hashlib.sha256(json.dumps(tokenizer.chat_template).encode()).hexdigest(),
        "max_length": max_length,
        "heldout": heldout,
        "seed": seed,
    }


def prepare(
    sources: Sequence[str | os.PathLike[str]],
    tokenizer: Any,
    out: str | os.PathLike[str],
    *,
    max_length: int = 1024,
    heldout: float = 0,
    seed: int = 0,
    progress: Progress = lambda stage, done, total: None,
) -> PrepareReport:
    """Write the dataset folder ``out`` from files of conversations.

    Args:
        sources: JSON or JSON-lines files, gzipped or not.
        tokenizer: the target's, with its chat template.
        max_length: most tokens a conversation may have; the rest is cut away and counted.
        heldout: fraction (below 1) or count of conversations to hold out by the rule of :mod:`data.overlap`; 0: none.
        seed: chooses what is held out.

    Raises:
        FileNotFoundError: a source is missing.
        ValueError: a source is damaged, no row is usable, the tokenizer has no chat template, or ``out`` holds files
            that preparing did not write. Nothing is written or deleted then.
    """
    paths, out = [Path(source) for source in sources], Path(out)
    if not paths:
        raise ValueError("no data file was named")
    if max_length < 1:
        raise ValueError(f"max_length is {max_length}, it must be 1 or more")
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"no data file {path}")
    provenance = _provenance(paths, tokenizer, max_length, heldout, seed)
    found = claimed(out)
    if found == provenance:
        return PrepareReport(**{**json.loads((out / REPORT).read_text()), "reused": True})
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = beside(out)
    partial.mkdir()
    try:
        report = _write(partial, paths, Renderer(tokenizer), max_length, heldout, seed, progress)
        (partial / REPORT).write_text(json.dumps(asdict(report), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        (partial / PROVENANCE).write_text(json.dumps(provenance, indent=2) + "\n")
        place(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return report


def _conversations(paths: Sequence[Path], report: PrepareReport) -> Iterator[tuple[str, Conversation]]:
    """Readable conversations, each with its ``file:row``; the others are counted in ``report``."""
    for path in paths:
        for number, row in read_rows(path):
            report.rows += 1
            where = f"{path.name}:{number}"
            try:
                conversation = read_conversation(row, where)
            except Refusal as refusal:
                report.drop(where, refusal)
                continue
            report.orphans += conversation.orphans
            yield where, conversation


def _write(
    folder: Path,
    paths: Sequence[Path],
    renderer: Renderer,
    max_length: int,
    heldout: float,
    seed: int,
    progress: Progress,
) -> PrepareReport:
    report = PrepareReport()
    conversations: Iterable[tuple[str, Conversation]] = _conversations(paths, report)
    parts: dict[str, Iterable[tuple[str, Conversation]]] = {"train": conversations}
    if heldout:
        every = list(conversations)
        if every:
            prompts = [conversation.prompt for _, conversation in every]
            chosen = split(prompts, heldout, seed)
            report.split = chosen.describe(prompts)
            parts = {"train": [every[i] for i in chosen.train], "heldout": [every[i] for i in chosen.heldout]}
    for name, members in parts.items():
        _write_part(folder, name, members, renderer, max_length, report, progress)
        if not report.kept[name]:
            reasons = ", ".join(f"{reason}: {count}" for reason, count in sorted(report.dropped.items()))
            first = f"; the first is {report.refused[0]}" if report.refused else ""
            raise ValueError(f"no usable row for {name} in {', '.join(map(str, paths))} ({reasons}){first}")
    return report


def _write_part(
    folder: Path,
    name: str,
    conversations: Iterable[tuple[str, Conversation]],
    renderer: Renderer,
    max_length: int,
    report: PrepareReport,
    progress: Progress,
) -> None:
    scratch = folder / f"{name}.arrow"
    kept = 0
    with ArrowWriter(path=str(scratch), features=FEATURES) as writer:
        for where, conversation in conversations:
            try:
                rendered = renderer.render(conversation.turns, finished=conversation.finished, max_length=max_length)
                if not any(rendered.mask):
                    raise Refusal("no answer within max_length", f"the first answer begins beyond {max_length} tokens")
            except Refusal as refusal:
                report.drop(where, refusal)
                continue
            writer.write(
                {
                    "id": conversation.id,
                    "input_ids": rendered.ids,
                    "loss_mask": rendered.mask,
                    "finished": rendered.finished,
                }
            )
            kept += 1
            report.cut += rendered.cut
            report.unfinished += not rendered.finished
            report.tokens += len(rendered.ids)
            report.supervised += sum(rendered.mask)
            if kept % STEP == 0:
                progress(name, kept, 0)
        writer.finalize()
    report.kept[name] = kept
    if kept:
        _save(scratch, folder / name)
    scratch.unlink()


def _save(scratch: Path, folder: Path) -> None:
    """One Arrow stream → a folder in the library's own layout, without the library's progress bar."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        datasets.Dataset.from_file(str(scratch)).save_to_disk(str(folder))
    finally:
        if shown:
            datasets.enable_progress_bars()


def load(folder: str | os.PathLike[str], split: str = "train") -> datasets.Dataset:
    """One split of a prepared folder.

    Columns: ``id`` (str), ``input_ids`` (list of int32), ``loss_mask`` (list of bool), ``finished`` (bool).

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
