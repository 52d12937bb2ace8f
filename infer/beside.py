"""Look-ahead control of prompt lookup, alone or beside a drafter that takes time: ``lookup+heads``, ``lookup|heads``.

What lookup can copy is known before anything is drafted, and so is about how often that holds (:mod:`infer.matches`);
it depends on the committed text alone, so choosing by it changes no law. Each round is given to whichever yields most
tokens a second: a copy of some length, which takes rows of the pass and nothing else; the other drafter's chain or
tree; where the two can be merged, both; or nothing. The other's acceptance is counted only where it drafted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from heads.draft import Draft
from heads.grow import NOTHING, Budget
from infer.control import LONGEST_WAIT, SLACK, TREE_WIDTH, TRIAL, AdaptiveControl, Costs
from infer.matches import Matches

COPIES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)  # tokens copied
BESIDE = 0.8  # of what the other drafter yields, where the copy's first token did not hold


class BesideControl(AdaptiveControl):
    """Of lookup, or of a drafter made of two: lookup, and one whose drafts take time.

    A single text is given the choice; texts decoded together, whose passes are as long as the longest draft, share a
    budget as with any drafter.

    Args:
        costs: the draft costs are those of the second drafter alone.
        depth: deepest draft of both together.
        copies: longest copy.
        other: deepest draft of the second drafter; 0 without one.
        name: lookup's, in a draft's sources.
        merges: whether both may draft in one round.
        rows: most rows of a pass.
        tree_rows, width, slack, trial: see :class:`~infer.control.AdaptiveControl`.
    """

    def __init__(
        self,
        costs: Costs,
        depth: int,
        *,
        copies: int,
        other: int,
        name: str = "lookup",
        merges: bool = False,
        rows: int | None = None,
        tree_rows: Sequence[int] = (),
        width: int = TREE_WIDTH,
        slack: float = SLACK,
        trial: float = TRIAL,
    ) -> None:
        super().__init__(costs, depth, tree_rows=tree_rows, width=width, slack=slack, trial=trial)
        self.matches = Matches()
        self._name, self._merges, self._deepest, self._most = name, merges, other, rows
        self._copies = [n for n in COPIES if n <= copies and (rows is None or n < rows)]
        self._second = AdaptiveControl(costs, other, tree_rows=tree_rows, width=width)  # the second drafter's ways
        budgets = [budget for budget, _, _ in self._second.ways(self.tracker, 1)]
        self._alone = [Budget.split([NOTHING, budget]) for budget in budgets]
        self._copied = [Budget.split([Budget.chain(n), NOTHING]) for n in self._copies]
        self._merged = [[Budget.split([Budget.chain(n), budget]) for budget in budgets] for n in self._copies]
        self._match = 0

    def budget(self, batch: int = 1, match: int = 0) -> Budget:
        """See :class:`~infer.control.Control`."""
        match = match if batch == 1 else 0
        if match != self._match:
            self._match, self._answer = match, None
        return super().budget(batch)

    def _expected(self, batch: int) -> Iterable[tuple[Budget, float, float]]:
        if batch > 1:
            yield from super()._expected(batch)
            return
        others = [(tokens, seconds) for _, tokens, seconds in self._second.ways(self.tracker, 1)]
        for budget, (tokens, seconds) in zip(self._alone, others, strict=True):
            yield budget, tokens, seconds
        if not self._match or not self._copies:
            return
        overhead, passes = self._overhead(), cache(lambda rows: self.costs.target(rows, 1))
        joint = self.matches.joint(self._match, self._copies[-1])
        for n, copy, merged in zip(self._copies, self._copied, self._merged, strict=True):
            tokens = 1 + sum(joint[:n])
            yield copy, tokens, passes(copy.rows) + overhead
            if not self._merges:
                continue
            for budget, (more, _) in zip(merged, others, strict=True):
                if self._most is None or budget.rows <= self._most:
                    seconds = passes(budget.rows) + overhead + self._drafting(budget)
                    yield budget, tokens + (1 - joint[0]) * BESIDE * (more - 1), seconds

    def _overhead(self) -> float:
        return self.costs.round(Budget.chain(0), 1) - self.costs.target(1, 1)

    def _timed(self, budget: Budget) -> Budget:
        return (budget.parts[1] if budget.parts else budget).within(self._deepest)

    def _round(self, budget: Budget, batch: int) -> float:
        return self.costs.target(budget.rows, batch) + batch * (self._overhead() + self._drafting(budget))

    def _idle(self, best: Budget) -> bool:
        if not best.parts or best.depth == 0:
            return best.depth == 0
        return best.parts[1].depth == 0 and self._waited >= LONGEST_WAIT  # copies pay: there is no hurry

    def _probes(self, batch: int) -> Sequence[Budget]:
        if batch > 1:
            return self.chains
        return self._alone[: len(self._second.chains)]

    def _with_floors(self, best: Budget, speed: float, plain: float, batch: int) -> Budget:
        if not best.parts:
            return super()._with_floors(best, speed, plain, batch)
        copy, other = best.parts
        return best if copy.depth else replace(best, parts=(copy, super()._with_floors(other, speed, plain, batch)))

    def _count(self, asked: Budget, draft: Draft, path: Sequence[int]) -> None:
        if not asked.parts:
            super()._count(asked, draft, path)
            return
        copied = next((at for at, each in enumerate(draft.sources) if each != self._name), len(draft))
        held = next((at for at, node in enumerate(path) if node != at or node >= copied), len(path))
        if asked.parts[0].depth:
            self.matches.observe(self._match, copied, held)
        other = asked.parts[1]
        if other.depth == 0:
            self._waited += 1
        elif not held:
            super()._count(other, *_without_copy(draft, path, copied))


def _without_copy(draft: Draft, path: Sequence[int], copied: int) -> tuple[Draft, list[int]]:
    """The nodes behind the first ``copied`` that do not hang from one of those, and the path in their numbers."""
    place = {-1: -1}
    for node in range(copied, len(draft)):
        if draft.parents[node] in place:
            place[node] = len(place) - 1
    kept = [node for node in place if node >= 0]

    def of(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(values[node] for node in kept) if values else ()

    rest = Draft(
        of(draft.tokens),
        tuple(place[draft.parents[node]] for node in kept),
        of(draft.q),
        draft.ids,
        of(draft.scores),
        of(draft.sources),
        of(draft.trust),
    )
    return rest, [place[node] for node in path]
