"""What became of the rows: counts, the first refusals in words, and a table of both for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from data.turns import Refusal

SHOWN = 20
"""Refused rows that a report quotes."""


@dataclass
class Refusals:
    """Rows that were not used: how many by reason, and the first of them as ``file:row: what was wrong``."""

    dropped: dict[str, int] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    def drop(self, where: str, refusal: Refusal) -> None:
        """Count a refused row, and quote it if it is among the first."""
        self.dropped[refusal.reason] = self.dropped.get(refusal.reason, 0) + 1
        if len(self.refused) < SHOWN:
            self.refused.append(f"{where}: {refusal}")

    def table(self) -> str:
        """Counts by line, then each reason with the number of its rows, then the first refusals."""
        why = [(f"  {reason}", count, "") for reason, count in sorted(self.dropped.items())]
        lines = [*self._lines(), ("refused", sum(self.dropped.values()), ""), *why]
        hidden = sum(self.dropped.values()) - len(self.refused)
        more = [f"  … and {hidden} more"] if hidden > 0 else []
        return "\n".join([counts_table(lines), *(f"  {line}" for line in self.refused), *more])

    def _lines(self) -> list[tuple[str, int, str]]:
        """Name, count and comment of what was used."""
        return []


@dataclass
class PrepareReport(Refusals):
    """What became of the rows.

    Attributes:
        rows: rows read.
        kept: conversations written, by split.
        cut: kept conversations that ended beyond ``max_length``.
        unfinished: kept conversations whose last answer is not whole (by their own word, or cut).
        orphans: assistant's turns dropped from the front of a conversation.
        unanswered: turns behind a last answer that a template does not let stand (see :class:`data.render.Rendered`).
        mended: kept conversations in which halves of surrogate pairs became U+FFFD.
        sequences: written; more than conversations where a template takes earlier thoughts away.
        tokens: tokens written.
        supervised: those of them that the loss mask covers.
        split: the closest pair across the split, when a part is held out.
        reused: the folder was there already, made by the same settings from the same sources.
        resumed: rows that an earlier, stopped run had prepared.
    """

    rows: int = 0
    kept: dict[str, int] = field(default_factory=dict)
    cut: int = 0
    unfinished: int = 0
    orphans: int = 0
    unanswered: int = 0
    mended: int = 0
    sequences: int = 0
    tokens: int = 0
    supervised: int = 0
    split: dict[str, Any] | None = None
    reused: bool = False
    resumed: int = 0

    def add(self, part: PrepareReport) -> None:
        """Count in what became of further rows."""
        for counts, more in ((self.kept, part.kept), (self.dropped, part.dropped)):
            for name, count in more.items():
                counts[name] = counts.get(name, 0) + count
        self.refused += part.refused[: SHOWN - len(self.refused)]
        for name in (
            "rows",
            "cut",
            "unfinished",
            "orphans",
            "unanswered",
            "mended",
            "sequences",
            "tokens",
            "supervised",
        ):
            setattr(self, name, getattr(self, name) + getattr(part, name))

    @property
    def clean(self) -> bool:
        """No row was refused and no turn taken away."""
        return not (self.dropped or self.orphans or self.unanswered)

    def _lines(self) -> list[tuple[str, int, str]]:
        kept = [(f"kept: {name}", count, "") for name, count in self.kept.items()]
        details = [
            ("  cut", self.cut, "ended beyond the longest length"),
            ("  unfinished", self.unfinished, "last answer without its end of turn"),
            ("  mended", self.mended, "halves of surrogate pairs became U+FFFD"),
            ("turns taken away", self.orphans, "answers before any question"),
            ("turns left out", self.unanswered, "questions behind the last answer, which the template would change"),
        ]
        return [("rows read", self.rows, ""), *kept, *(line for line in details if line[1])]


def counts_table(lines: Sequence[tuple[str, int, str]]) -> str:
    """Name, count and comment in columns."""
    width = max(len(name) for name, _, _ in lines)
    digits = max(len(str(count)) for _, count, _ in lines)
    return "\n".join(f"{name:<{width}}  {count:>{digits}}  {comment}".rstrip() for name, count, comment in lines)


def reasons(dropped: Mapping[str, int]) -> str:
    """Reasons and counts in a line."""
    return ", ".join(f"{reason}: {count}" for reason, count in sorted(dropped.items()))
