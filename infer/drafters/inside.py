"""Trained heads that draft inside the verification pass, as the loop sees them: alone, or as a part of a hybrid."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from heads.draft import Draft
from heads.grow import Budget
from heads.inside import DraftsInside, ExtraRows
from heads.target import Target
from infer.drafters.protocol import Drafter, Inside


class HeadsInside:
    """Heads with the state of one text.

    Args:
        heads: that draft inside the pass.
        state: asked for the state that is to read the pass, at the time.
    """

    def __init__(self, heads: DraftsInside, state: Callable[[], Any]) -> None:
        self.heads, self._state = heads, state

    def usual(self, depth: int) -> Budget:
        """See :class:`~infer.drafters.protocol.Inside`, here and below."""
        return self.heads.usual(depth)

    def reserve(self, budget: Budget) -> Budget:
        """As the heads say."""
        return self.heads.reserve(budget)

    def extra_rows(self, draft: Draft, budget: Budget, room: int) -> ExtraRows:
        """As the heads say."""
        return self.heads.extra_rows(draft, budget, room)

    def applied(self, target: Target, first: int, slots: Tensor) -> AbstractContextManager[None]:
        """As the heads say."""
        return self.heads.applied(target, first, slots)

    def read(self, taps: Tensor) -> None:
        """Into the text's state."""
        self.heads.read(self._state(), taps)


class PartInside:
    """A hybrid's part that drafts inside the pass; it reads its own of the hybrid's taps.

    Args:
        inner: of the part.
        own: the part's taps of all of them.
    """

    def __init__(self, inner: Inside, own: Callable[[Tensor], Tensor | None]) -> None:
        self.inner, self._own = inner, own
        self.usual, self.reserve, self.extra_rows = inner.usual, inner.reserve, inner.extra_rows
        self.applied = inner.applied

    def read(self, taps: Tensor) -> None:
        """The part's own."""
        own = self._own(taps)
        assert own is not None, "what drafts inside a pass reads taps"
        self.inner.read(own)


def inside_of(drafter: Drafter) -> Inside | None:
    """What of a drafter drafts inside the pass, if anything does."""
    return getattr(drafter, "inside", None)


def usual_budget(drafter: Drafter, depth: int | None = None) -> Budget:
    """Chains of ``depth`` tokens, the drafter's look-ahead by default, with what rows it takes to draft them."""
    depth = drafter.lookahead if depth is None else depth
    inside = inside_of(drafter)
    return Budget.chain(depth) if inside is None else inside.usual(depth)


def refuse_inside(drafter: Drafter, what: str) -> None:
    """Refuse what is not supported with a drafter that drafts inside the pass.

    Args:
        what: begins the message.

    Raises:
        ValueError: it does.
    """
    if inside_of(drafter) is not None:
        raise ValueError(f"{what} is not supported with heads that draft inside the verification pass (kind mtp)")
