"""Several drafters on one text: the first that has something to say drafts a round, written ``a+b``.

All of them follow the text all the time, whoever drafts. The target is asked once for the taps they read together.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

from torch import Tensor, nn

from heads.draft import Draft
from heads.grow import Budget, Sampler
from heads.target import Target
from infer.drafters.inside import PartInside, inside_of
from infer.drafters.protocol import Drafter, Inside


class TapSlices:
    """The taps that several drafters read, each once, and every drafter's own part of them.

    Args:
        wanted: each drafter's taps; () for one that reads none.

    Attributes:
        taps: all of them, in the order in which they are first named.
    """

    def __init__(self, wanted: Sequence[tuple[int, ...]]) -> None:
        self.taps = tuple(dict.fromkeys(tap for taps in wanted for tap in taps))
        self._places = [[self.taps.index(tap) for tap in taps] for taps in wanted]

    def of(self, part: int, taps: Tensor | None) -> Tensor | None:
        """What drafter number ``part`` reads, (1, n, its taps·H), of the union's (1, n, taps·H); None for none."""
        places = self._places[part]
        if not places:
            return None
        assert taps is not None, "taps were asked for"
        if places == list(range(len(self.taps))):
            return taps
        states = taps.unflatten(-1, (len(self.taps), -1))
        return states[..., places, :].flatten(-2)


class Several:
    """Drafters that follow one text together; how a draft comes of theirs is up to the subclass.

    Args:
        parts: the drafters, in order.
        names: of each, as ``Draft.sources`` shows them; their classes' names by default.

    Raises:
        ValueError: no drafter, or not as many names.
    """

    lookahead: int

    def __init__(self, parts: Sequence[Drafter], names: Sequence[str] | None = None) -> None:
        self.parts: tuple[Drafter, ...] = tuple(parts)
        self.names = tuple(_class_name(part) for part in parts) if names is None else tuple(names)
        if not self.parts or len(self.names) != len(self.parts):
            raise ValueError(f"a hybrid needs drafters and a name for each, not {len(parts)} and {len(self.names)}")
        self._slices = TapSlices([tuple(part.taps) for part in self.parts])
        self.taps = self._slices.taps

    @property
    def module_seconds(self) -> float:
        """Of all parts together."""
        return sum(part.module_seconds for part in self.parts)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The networks of all parts."""
        return tuple(module for part in self.parts for module in getattr(part, "modules", ()))

    @property
    def inside(self) -> Inside | None:
        """The part that drafts in the target's passes; whichever part drafts, its rows ride along.

        Raises:
            ValueError: several of them do.
        """
        found = [(at, inside) for at, part in enumerate(self.parts) if (inside := inside_of(part)) is not None]
        if len(found) > 1:
            raise ValueError("only one drafter of a hybrid can draft inside the verification pass (heads of kind mtp)")
        return PartInside(found[0][1], partial(self._slices.of, found[0][0])) if found else None

    @property
    def shares_cache(self) -> bool:
        """Whether a part drafts in the target's own cache."""
        return any(_shares(part) for part in self.parts)

    def share(self, row: Any) -> None:
        """Hand the text's part of the target's cache to those that draft in it."""
        for part in filter(_shares, self.parts):
            part.share(row)  # type: ignore[attr-defined]

    def begin(self, target: Target, ids: Tensor, taps: Tensor | None) -> None:
        """A new text, to each with its own taps."""
        for at, part in enumerate(self.parts):
            part.begin(target, ids, self._slices.of(at, taps))

    def commit(self, taps: Tensor | None, ids: list[int]) -> None:
        """What a round emitted, to each with its own taps."""
        for at, part in enumerate(self.parts):
            part.commit(self._slices.of(at, taps), ids)

    def fork(self) -> Self:
        """The same drafters for another text."""
        other = copy.copy(self)
        other.parts = tuple(part.fork() for part in self.parts)
        return other

    @property
    def match(self) -> int:
        """How much text the parts that copy it go on from (:class:`~infer.drafters.lookup.LookupDrafter`)."""
        return max((getattr(part, "match", 0) for part in self.parts), default=0)

    def _ask(self, at: int, budget: Budget, sampler: Sampler | None) -> Draft:
        """Part ``at``'s draft: no larger than asked for, no deeper than its own look-ahead, its nodes' source named.

        Raises:
            ValueError: the budget is split for other parts than there are.
        """
        part = self.parts[at]
        if budget.parts:
            if len(budget.parts) != len(self.parts):
                raise ValueError(f"a budget split in {len(budget.parts)} does not fit {len(self.parts)} drafters")
            budget = budget.parts[at]
        budget = budget.within(part.lookahead)
        if budget.depth == 0 or budget.rows < 2:
            return Draft.empty()
        draft = part.propose(budget, sampler).shorten(depth=budget.depth, nodes=budget.rows - 1)
        return draft if draft.sources else replace(draft, sources=(self.names[at],) * len(draft))


class FirstToSpeak(Several):
    """``a+b``: the draft is that of the first part that has one.

    Which part that is may hang on the committed text alone, as with lookup, whose matches are long enough or not;
    then sampling stays exact. No part drafts deeper than its own look-ahead.
    """

    def __init__(self, parts: Sequence[Drafter], names: Sequence[str] | None = None) -> None:
        super().__init__(parts, names)
        self.lookahead = max(part.lookahead for part in parts)

    def propose(self, budget: Budget, sampler: Sampler | None) -> Draft:
        """The first part's that is not empty."""
        drafts = (self._ask(at, budget, sampler) for at in range(len(self.parts)))
        return next((draft for draft in drafts if len(draft)), Draft.empty())


def _class_name(part: Drafter) -> str:
    return type(part).__name__.removesuffix("Drafter").lower()


def _shares(part: Drafter) -> bool:
    return bool(getattr(part, "shares_cache", False))
