"""No draft: every round is a plain decoding step. The control that all figures are compared with."""

from __future__ import annotations

from torch import Tensor

from heads.draft import Draft
from heads.grow import Budget, Sampler
from heads.target import Target


class NoDrafter:
    """Proposes nothing."""

    taps: tuple[int, ...] = ()
    lookahead = 0
    module_seconds = 0.0

    def begin(self, target: Target, ids: Tensor, taps: Tensor | None) -> None:
        """Nothing to remember."""

    def propose(self, budget: Budget, sampler: Sampler | None) -> Draft:
        """The empty draft."""
        return Draft.empty()

    def commit(self, taps: Tensor | None, ids: list[int]) -> None:
        """Nothing to remember."""

    def fork(self) -> NoDrafter:
        """It has no state: itself."""
        return self
