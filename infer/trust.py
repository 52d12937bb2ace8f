"""Ending a chain where the drafter's own word says so: what that word is worth, and what a further token costs.

Some heads tell, before each token, how likely it is to be accepted (DSpark's confidence, arXiv 2607.05147). A token
adds the chance that it and all before it hold; it costs a row of the pass. Where seconds buy ``speed`` tokens on the
whole, it pays for as long as

    chance of the chain so far  ≥  speed · seconds of one more row

which is how a chain ends in the cycle that yields most tokens a second. The word is calibrated first, by how often what
was told at each depth held: the product of told chances is compared with the floor over those factors. Floors come from
past rounds and the word from tokens that stand before, so that no draft depends on a token it ends with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from heads.draft import Draft

WEIGHT = 2.0  # rounds in which the word is taken to have been true before anything was seen
DECAY = 0.98  # of what was seen, a round
WHOLE = 16  # every so many chains one is drafted whole, so that a word that is too low is found out


class Prices(Protocol):
    """Seconds by size, as :class:`infer.lookahead.CostTable` has them."""

    def target(self, rows: int, batch: int = 1) -> float:
        """A pass over ``batch`` texts with ``rows`` rows each."""
        ...

    def draft(self, depth: int, width: int) -> float:
        """One text's draft."""
        ...


class Word:
    """What a drafter told of its chains, and what of it held.

    Attributes:
        given: whether it has told anything yet.
    """

    def __init__(self) -> None:
        self.given = False
        # by depth, decayed: rounds that got so far, chances told there, tokens that held
        self._seen: list[list[float]] = []
        self._drafts = 0

    def observe(self, draft: Draft, path: Sequence[int]) -> None:
        """One chain and its accepted nodes; drafts without a word, and trees, say nothing."""
        if not draft.trust or not draft.is_chain:
            return
        self.given = True
        for depth, told in enumerate(draft.trust[: len(path) + 1]):
            if depth == len(self._seen):
                self._seen.append([0.0, 0.0, 0.0])
            if math.isfinite(told):
                new = (1.0, told, float(depth < len(path)))
                self._seen[depth] = [old * DECAY + more for old, more in zip(self._seen[depth], new, strict=True)]

    def factor(self, depth: int) -> float:
        """What a chance told at a depth, from 0, is to be multiplied by."""
        rounds, told, held = self._seen[depth] if depth < len(self._seen) else (0.0, 0.0, 0.0)
        if not told:
            return 1.0
        prior = WEIGHT * told / rounds
        return (held + prior) / (told + prior)

    def whole(self) -> bool:
        """Whether the next chain is to be drafted whole; asked once a round."""
        self._drafts += 1
        return self._drafts % WHOLE == 0

    def floors(self, prices: Prices, depth: int, speed: float, batch: int = 1) -> tuple[float, ...]:
        """For each depth the product of told chances below which a chain of ``depth`` tokens ends before that token.

        Args:
            prices: what rows and drafts cost.
            speed: tokens a text that a second buys now, by the same prices.
            batch: texts in a pass. One more row is one for all of them; each is charged its part.
        """
        found, calibrated = [], 1.0
        for at in range(depth):
            calibrated *= self.factor(at)
            seconds = prices.target(at + 2, batch) - prices.target(at + 1, batch)
            if at:  # the first token's draft is made by the time its chance is known
                seconds += batch * (prices.draft(at + 1, 1) - prices.draft(at, 1))
            found.append(max(speed * seconds, 0.0) / calibrated)
        return tuple(found)
