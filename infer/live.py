"""A cost table that follows the clock: what passes and drafts cost right now, from running medians of real rounds.

For decoding without a seed. The machine may be busier than when its table was measured and the text is longer than it
was then; every round that is decoded says by how much.
"""

from __future__ import annotations

import statistics
from collections import deque

from heads.grow import Budget
from infer.lookahead import CostTable
from infer.metrics import Round

KEPT, ENOUGH = 9, 3  # rounds a median is taken of; sizes seen less often are only scaled


class LiveCosts:
    """The same questions as :class:`~infer.lookahead.CostTable` answers, with answers that move.

    Args:
        table: where the figures start from; sizes never seen keep their proportion to those that were.
    """

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self._passes: dict[tuple[int, int], deque[float]] = {}
        self._drafts: deque[float] = deque(maxlen=KEPT)
        self._scales: dict[int, float] = {}

    def target(self, rows: int, batch: int = 1) -> float:
        """Seconds of a pass over ``batch`` texts with ``rows`` rows each, the loop's own work included."""
        seen = self._passes.get((rows, batch), ())
        if len(seen) >= ENOUGH:
            return statistics.median(seen)
        known = self.table.target(rows, batch) + batch * self.table.overhead
        return known * self._scale(batch)

    def draft(self, depth: int, width: int) -> float:
        """Seconds of one text's draft."""
        scale = statistics.median(self._drafts) if len(self._drafts) >= ENOUGH else 1.0
        return self.table.draft(depth, width) * scale

    def round(self, budget: Budget, batch: int = 1) -> float:
        """Seconds of one round of ``batch`` texts under ``budget``."""
        return self.target(budget.rows, batch) + batch * self.draft(budget.depth, budget.width)

    def learn(self, asked: Budget, rows: int, batch: int, done: Round) -> None:
        """Take in one text's part of a round.

        Args:
            asked: what it was drafted under.
            rows: rows a text of the pass.
            batch: texts in it.
            done: seconds, as shares of the round.
        """
        passed = (done.seconds - done.draft_total_seconds) * batch
        if passed > 0:
            self._passes.setdefault((rows, batch), deque(maxlen=KEPT)).append(passed)
            self._scales.clear()
        expected = self.table.draft(asked.depth, asked.width)
        if expected > 0 and done.proposed:
            self._drafts.append(done.draft_total_seconds / expected)

    def _scale(self, batch: int) -> float:
        """How much dearer passes are than the table says, by the sizes that were seen, of this batch if any was."""
        if batch not in self._scales:
            ratios = {
                key: statistics.median(seen) / (self.table.target(*key) + key[1] * self.table.overhead)
                for key, seen in self._passes.items()
                if len(seen) >= ENOUGH
            }
            same = [ratio for (_, size), ratio in ratios.items() if size == batch]
            self._scales[batch] = statistics.median(same or list(ratios.values()) or [1.0])
        return self._scales[batch]
