"""Trained heads as a drafter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from heads.base import DraftHeads
from heads.draft import Draft
from heads.grow import Budget, Sampler
from heads.inside import DraftsInside
from heads.target import Target
from infer.drafters.inside import HeadsInside
from infer.drafters.protocol import Inside
from infer.drafters.timed import ModuleClock

PENDING = 64  # committed rows that may wait, so that their taps stay small


class HeadsDrafter:
    """Drafts with heads; their state follows the committed text.

    What is committed, the prompt too, waits until a draft is asked for and is then read in one pass: rounds without a
    draft or with another drafter's, which look-ahead control may choose, do not pay for heads that they do not use. The
    prompt's taps are held until then, or until ``PENDING`` tokens more have been committed.

    Args:
        heads: on the target that decodes (``drafters.make`` checks that it is).
    """

    def __init__(self, heads: DraftHeads) -> None:
        self.heads = heads
        self.taps = tuple(heads.config.taps)
        self.lookahead = heads.config.lookahead
        self._clock = ModuleClock()
        self._state: Any = None
        self._prompt: tuple[Tensor, Tensor] | None = None  # taps and ids that wait
        self._pending: list[tuple[Tensor, list[int]]] = []

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Put in eval mode while a text is decoded."""
        return (self.heads,)

    @property
    def module_seconds(self) -> float:
        """Time inside the heads' modules."""
        return self._clock.seconds

    @property
    def inside(self) -> Inside | None:
        """What of it takes part in the target's passes, for heads that draft there."""
        if not isinstance(self.heads, DraftsInside):
            return None
        return HeadsInside(self.heads, lambda: self._state)

    def begin(self, target: Target, ids: Tensor, taps: Tensor | None) -> None:
        """Remember the prompt's taps; heads that draft in the target's passes read them at once."""
        self._pending = []
        self._prompt = self._cast(taps), ids
        if self.inside is not None:
            self._start()

    def propose(self, budget: Budget, sampler: Sampler | None) -> Draft:
        """Grow a draft from the committed text."""
        self._advance()
        with self._clock.running():
            return self.heads.propose(self._state, budget, sampler)

    def commit(self, taps: Tensor | None, ids: list[int]) -> None:
        """Remember the target's own taps for what was accepted."""
        self._pending.append((self._cast(taps), ids))
        if sum(len(ids) for _, ids in self._pending) >= PENDING:
            self._advance()

    def _start(self) -> None:
        """Read the prompt, unless that is done."""
        if self._prompt is None:
            return
        (taps, ids), self._prompt = self._prompt, None
        with self._clock.running():
            self._state = self.heads.start(taps, ids)

    def _advance(self) -> None:
        """Go on with what was committed since the last draft."""
        self._start()
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        taps = torch.cat([taps for taps, _ in pending], 1)
        ids = [token for _, ids in pending for token in ids]
        with self._clock.running():
            self.heads.advance(self._state, taps, torch.tensor([ids], device=taps.device))

    def fork(self) -> HeadsDrafter:
        """The same heads for another text."""
        return HeadsDrafter(self.heads)

    def _cast(self, taps: Tensor | None) -> Tensor:
        assert taps is not None, "heads name at least one tap"
        return taps.to(next(self.heads.parameters()).dtype)
