"""Trained heads as a drafter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heads.base import DraftHeads
from heads.draft import Draft
from heads.grow import Budget, Sampler
from heads.target import Target
from infer.drafters.timed import ModuleClock


class HeadsDrafter:
    """Drafts with heads; their state follows the committed text.

    Args:
        heads: on the target that decodes (``drafters.make`` checks that it is).
    """

    def __init__(self, heads: DraftHeads) -> None:
        self.heads = heads
        self.taps = tuple(heads.config.taps)
        self.lookahead = heads.config.lookahead
        self._clock = ModuleClock()
        self._state: Any = None

    @property
    def module_seconds(self) -> float:
        """Time inside the heads' modules."""
        return self._clock.seconds

    def begin(self, target: Target, ids: Tensor, taps: Tensor | None) -> None:
        """Read the prompt's taps."""
        with self._clock.running():
            self._state = self.heads.start(self._cast(taps), ids)

    def propose(self, budget: Budget, sampler: Sampler | None) -> Draft:
        """Grow a draft from the committed text."""
        with self._clock.running():
            return self.heads.propose(self._state, budget, sampler)

    def commit(self, taps: Tensor | None, ids: list[int]) -> None:
        """Go on with the target's own taps for what was accepted."""
        with self._clock.running():
            taps = self._cast(taps)
            self.heads.advance(self._state, taps, torch.tensor([ids], device=taps.device))

    def fork(self) -> HeadsDrafter:
        """The same heads for another text."""
        return HeadsDrafter(self.heads)

    def _cast(self, taps: Tensor | None) -> Tensor:
        assert taps is not None, "heads name at least one tap"
        return taps.to(next(self.heads.parameters()).dtype)
