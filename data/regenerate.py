"""The target writes the answers of conversations anew, so that heads learn what it says and not what others said.

    OUT/journal.jsonl          every conversation as it ended, in the order of ending; a stopped run goes on from it
    OUT/conversations.jsonl    those with at least one answer, sorted by id; cut and half-failed ones are marked
    OUT/failed.jsonl           those without an answer, and why
    OUT/regeneration.json      the settings; a folder begun with others is never continued

Neither the order of the rows nor that of the answers changes what is written in the end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.conversation import read_conversation
from data.files import parse, replacing
from data.journal import append, claim, journal_rows
from data.report import Refusals, reasons
from data.rewrite import CUT, FAILED, WHOLE, Answerer, Rewriting
from data.roles import checked_roles
from data.sources import Source, open_sources
from data.turns import Refusal

JOURNAL, CONVERSATIONS, FAILURES, SETTINGS = "journal.jsonl", "conversations.jsonl", "failed.jsonl", "regeneration.json"

KEYS = ("id", "key", "status", "messages")
"""Of every row of the journal."""

Progress = Callable[[str, int, int], None]
"""Told the stage, how many conversations have ended, and of how many (0: unknown)."""


@dataclass
class RegenerateReport(Refusals):
    """What became of the rows.

    Attributes:
        rows: rows read.
        whole: conversations with all their answers.
        cut: ended by an answer that reached the limit.
        failed: ended by an answer that did not come; ``lost`` of them have none at all.
        duplicates: rows that ask the same as another, asked once.
        there: conversations that an earlier run had asked.
        answer_tokens: of all answers, as far as they were counted.
    """

    rows: int = 0
    whole: int = 0
    cut: int = 0
    failed: int = 0
    lost: int = 0
    duplicates: int = 0
    there: int = 0
    answer_tokens: int = 0

    @property
    def clean(self) -> bool:
        """Every row was answered to its end."""
        return not (self.dropped or self.failed or self.cut)

    def _lines(self) -> list[tuple[str, int, str]]:
        return [
            ("rows read", self.rows, ""),
            ("whole", self.whole, ""),
            ("cut", self.cut, "an answer reached the limit"),
            ("failed", self.failed, f"an answer did not come; {self.lost} have none at all, see {FAILURES}"),
            ("duplicates", self.duplicates, "asked once"),
            ("asked before", self.there, "by an earlier run"),
        ]


def regenerate(
    sources: Sequence[str | os.PathLike[str]],
    answerer: Answerer,
    out: str | os.PathLike[str],
    settings: Mapping[str, Any],
    *,
    roles: Mapping[str, str] | None = None,
    retry_failed: bool = False,
    progress: Progress = lambda stage, done, total: None,
) -> RegenerateReport:
    """Rewrite the answers of all conversations in ``sources`` and put them into ``out``.

    Args:
        sources: as :func:`data.prepare.prepare` takes them; rows that only ask are welcome.
        answerer: the local engine or a server.
        settings: what determines the answers (model, limits, temperature, seed), kept in the folder.
        roles: further names of roles → system, user, assistant or tool.
        retry_failed: ask those again that failed in an earlier run.

    Raises:
        FileNotFoundError: a source is missing.
        ValueError: ``out`` holds something else or was begun with other settings, or no conversation was answered.
        OSError: the server cannot be used; what was answered is kept, and the next run goes on.
    """
    out = Path(out)
    names, opened = checked_roles(roles or {}), open_sources(sources)
    claim(out, SETTINGS, "regeneration", settings)
    status = {row["key"]: row["status"] for _, row in journal_rows(out / JOURNAL, *KEYS)}
    report = RegenerateReport()
    asked: set[str] = set()

    def missing() -> Iterator[Rewriting]:
        for one in _questions(opened, names, report):
            if one.key in asked:
                report.duplicates += 1
                continue
            asked.add(one.key)
            found = status.get(one.key)
            if found is None or (found == FAILED and retry_failed):
                yield one
            else:
                report.there += 1

    for ended, done in enumerate(answerer.play(missing()), 1):
        append(out / JOURNAL, [done.row()], sync=False)
        progress("conversations", report.there + ended, 0)
    _finish(out, asked, report)
    if not report.whole + report.cut + report.failed - report.lost:
        first = f"; the first is {report.refused[0]}" if report.refused else ""
        raise ValueError(f"no conversation was answered ({report.lost} failed; {reasons(report.dropped)}){first}")
    return report


def _questions(sources: Iterable[Source], roles: Mapping[str, str], report: RegenerateReport) -> Iterator[Rewriting]:
    for source in sources:
        for number, raw in source.rows():
            report.rows += number > 0
            try:
                yield Rewriting.of(read_conversation(parse(raw), "", roles, answered=False))
            except Refusal as refusal:
                report.drop(f"{source.name}:{number}", refusal)


def _finish(out: Path, asked: set[str], report: RegenerateReport) -> None:
    """The journal's rows of these conversations, of each the last, sorted, as files of their own."""
    last: dict[str, tuple[str, str, int, bool]] = {}
    for at, row in journal_rows(out / JOURNAL, *KEYS):
        if row["key"] in asked:
            last[row["key"]] = (row["id"], row["key"], at, bool(row["messages"]))
    if not last:
        return
    with (
        (out / JOURNAL).open("rb") as journal,
        replacing(out / CONVERSATIONS) as whole,
        replacing(out / FAILURES) as lost,
        whole.open("wb") as kept,
        lost.open("wb") as others,
    ):
        for _, _, at, answered in sorted(last.values()):
            journal.seek(at)
            line = journal.readline()
            (kept if answered else others).write(line)
            row = json.loads(line)
            report.whole += row["status"] == WHOLE
            report.cut += row["status"] == CUT
            report.failed += row["status"] == FAILED
            report.lost += not answered
            report.answer_tokens += row["answer_tokens"]
