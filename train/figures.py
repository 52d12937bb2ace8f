"""Figures of a run, formed from counts: sums are added over micro-batches and processes first, then divided."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from heads.base import LossReport
from train.ranks import Ranks


@dataclass(frozen=True)
class Figures:
    """What the sums say.

    Attributes:
        loss: the total over its count.
        rows: rows at the first draft position.
        terms: name → mean by draft position.
        acceptance: by draft position, share of rows whose arg-max is the target's here and at all earlier positions;
            of the rows at the first position that have a target token so deep.
        overlap: mean of Σ min(p, q) by draft position: what sampling one token would accept.
    """

    loss: float
    rows: int
    terms: dict[str, list[float]]
    acceptance: list[float]
    overlap: list[float]

    @property
    def tokens_per_round(self) -> float:
        """τ that a chain restarted at every position would have."""
        return 1.0 + sum(self.acceptance)

    def flat(self, prefix: str) -> dict[str, float]:
        """``prefix/loss``, ``prefix/soft_ce/1``, ``prefix/acceptance/1``, … for trackers."""
        lists = {**self.terms, "acceptance": self.acceptance, "overlap": self.overlap}
        values = {f"{prefix}/{name}/{k}": value for name, each in lists.items() for k, value in enumerate(each, 1)}
        return {f"{prefix}/loss": self.loss, f"{prefix}/tokens_per_round": self.tokens_per_round, **values}


class Sums:
    """Adds loss reports up, in float64.

    Attributes:
        values: what was added since the figures were last formed; None for nothing. A checkpoint keeps it, so that
            a run that goes on logs what it would have logged.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self.values: torch.Tensor | None = None

    def add(self, report: LossReport, *, counts: bool = True, measured: bool = True) -> None:
        """Add a report; one that does not count is only noted, so that all processes know the same names.

        ``measured`` says whether its acceptance and overlap were filled; they are divided by the rows they are of.
        """
        self._names = list(report.terms)
        seen = report.counts * measured
        parts = [report.total.detach()[None], report.count[None], report.counts, seen, report.accepted, report.overlap]
        values = torch.cat([part.detach().double().cpu() for part in (*parts, *report.terms.values())]) * float(counts)
        self.values = values if self.values is None else self.values + values

    def figures(self, ranks: Ranks) -> Figures:
        """Ratios over all processes since the last call, which every process makes; starts anew afterwards."""
        assert self.values is not None, "nothing was added"
        total, count, *rest = ranks.add(self.values.tolist())
        k = len(rest) // (4 + len(self._names))
        counts, seen, accepted, overlap, *terms = (rest[at : at + k] for at in range(0, len(rest), k))
        self.values = None

        def mean(sums: list[float], over: list[float]) -> list[float]:
            return [value / number if number else 0.0 for value, number in zip(sums, over, strict=True)]

        return Figures(
            loss=total / count if count else 0.0,
            rows=int(counts[0]),
            terms={name: mean(sums, counts) for name, sums in zip(self._names, terms, strict=True)},
            acceptance=mean(accepted, seen),
            overlap=mean(overlap, seen),
        )
