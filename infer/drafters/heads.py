"""Trained heads as a drafter."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from heads.base import DraftHeads
from heads.draft import Draft
from heads.grow import Budget, Sampler
from heads.target import Target


class HeadsDrafter:
    """Drafts with heads; their state follows the committed text.

    Args:
        heads: on the target that decodes (``drafters.make`` checks that it is).
    """

    def __init__(self, heads: DraftHeads) -> None:
        self.heads = heads
        self.taps = tuple(heads.config.taps)
        self.lookahead = heads.config.lookahead
        self.module_seconds = 0.0
        self._state: Any = None

    def begin(self, target: Target, ids: Tensor, taps: Tensor | None) -> None:
        """Read the prompt's taps."""
        with self._timed():
            self._state = self.heads.start(self._cast(taps), ids)

    def propose(self, budget: Budget, sampler: Sampler | None) -> Draft:
        """Grow a draft from the committed text."""
        with self._timed():
            return self.heads.propose(self._state, budget, sampler)

    def commit(self, taps: Tensor | None, ids: list[int]) -> None:
        """Go on with the target's own taps for what was accepted."""
        with self._timed():
            taps = self._cast(taps)
            self.heads.advance(self._state, taps, torch.tensor([ids], device=taps.device))

    def _cast(self, taps: Tensor | None) -> Tensor:
        assert taps is not None, "heads name at least one tap"
        return taps.to(next(self.heads.parameters()).dtype)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count the time inside outermost module calls; nothing stays registered afterwards."""
        depth, started = 0, 0.0

        def enter(*_: Any) -> None:
            nonlocal depth, started
            if depth == 0:
                started = time.perf_counter()
            depth += 1

        def leave(*_: Any) -> None:
            nonlocal depth
            depth -= 1
            if depth == 0:
                self.module_seconds += time.perf_counter() - started

        hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
