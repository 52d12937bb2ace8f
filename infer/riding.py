"""Look-ahead control of heads that draft inside the verification pass (kind mtp).

What such heads draft in a round was laid out in the round before, as mask rows of its pass: the first draft comes one
round after it was asked for, and a budget's rows are paid whether its tokens hold or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from heads.draft import Draft
from heads.grow import Budget
from infer.control import SLACK, TRIAL, AdaptiveControl, Costs
from infer.tracking import Tracker


class RidingControl(AdaptiveControl):
    """Chooses among budgets that count mask rows.

    Args:
        costs: what rounds cost.
        chains: the budgets, shallowest first.
        slack, trial: see :class:`~infer.control.AdaptiveControl`.
    """

    def __init__(self, costs: Costs, chains: Sequence[Budget], *, slack: float = SLACK, trial: float = TRIAL) -> None:
        super().__init__(costs, max((chain.depth for chain in chains), default=0), slack=slack, trial=trial)
        self.chains = list(chains)
        self._laid = 0  # how deep the round before allows a draft to be

    def ways(self, tracker: Tracker, batch: int) -> Iterable[tuple[Budget, float, float]]:
        shares = tracker.shares()
        for chain in self.chains:
            tokens = 1.0
            for share, voice in shares:
                chance = 1.0
                held = (row[0] for row in voice.acceptance(tracker.drawn(False), chain.depth))
                for reach, holds in zip(voice.reaches(chain.depth), held, strict=True):
                    chance *= holds
                    tokens += share * reach * chance
            yield chain, tokens, self.costs.round(chain, batch)

    def _choose(self, batch: int) -> Budget:
        self._laid = self._asked.depth  # once a round, however many texts there are
        return super()._choose(batch)

    def _count(self, asked: Budget, draft: Draft, path: Sequence[int]) -> None:
        if asked.depth == 0 or self._laid:
            super()._count(asked.within(self._laid), draft, path)
