"""Prompt lookup: what followed the last time the text came to where it is now (n-grams of prompt and output).

No network and no training; where a text quotes, edits or repeats itself, little drafts better. The longest suffix of
the text that occurred before says what comes next, shorter ones what else might (prediction by partial matching).
"""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

from torch import Tensor

from heads.draft import Draft
from heads.grow import Budget, Sampler
from heads.target import Target
from infer.drafters.automaton import SuffixAutomaton

LOOKAHEAD = 10
SHORTEST = 2
FALLBACKS = 4  # suffixes asked for continuations of one place, the longest first


class Place(NamedTuple):
    """Where a text, drafted tokens included, is found in what was committed: an automaton's state, and how long the
    suffix is that was found."""

    state: int
    matched: int


class LookupDrafter:
    """Drafts what followed earlier occurrences of the text's own last tokens.

    A chain takes the continuation seen most often, the latest among equals, at each place; a tree takes others with
    it. Tokens are chosen, never drawn. Where nothing matches, nothing is proposed.

    Args:
        shortest: shortest match to draft from, in tokens.
        lookahead: how deep it drafts when the caller names no budget.

    Raises:
        ValueError: a match of less than one token.
    """

    taps: tuple[int, ...] = ()
    module_seconds = 0.0
    free = True  # drafts at no cost

    def __init__(self, shortest: int = SHORTEST, *, lookahead: int = LOOKAHEAD) -> None:
        if shortest < 1:
            raise ValueError(f"lookup drafts from matches of 1 token or more, not {shortest}")
        self.shortest, self.lookahead = shortest, lookahead
        self._seen = SuffixAutomaton()

    def fork(self) -> LookupDrafter:
        """For another text, of which nothing is known yet."""
        return LookupDrafter(self.shortest, lookahead=self.lookahead)

    def begin(self, target: Target, ids: Tensor, taps: Tensor | None) -> None:
        """Read the prompt."""
        self._seen = SuffixAutomaton()
        self.commit(None, ids[0].tolist())

    def commit(self, taps: Tensor | None, ids: list[int]) -> None:
        """Read on."""
        for token in ids:
            self._seen.append(token)

    @property
    def match(self) -> int:
        """Tokens of the earlier passage that the next draft goes on from; 0 where it has nothing to draft."""
        matched = self._seen.longest()[1]
        return matched if matched >= self.shortest else 0

    def propose(self, budget: Budget, sampler: Sampler | None) -> Draft:
        """A chain, a tree of the budget's shape as far as there are continuations, or the likeliest ones of a tree."""
        place = Place(*self._seen.longest())
        if place.matched < self.shortest or budget.rows < 2 or budget.depth < 1:
            return Draft.empty()
        return self._shaped(budget.shape, place) if budget.shape is not None else self._likeliest(budget, place)

    def _likeliest(self, budget: Budget, place: Place) -> Draft:
        """The likeliest paths first, as long as there are rows: of width 1 a chain."""
        nodes: list[tuple[int, int, float]] = []
        offers: list[tuple[int, int, int, float, Place]] = []  # parent, token, depth, log-probability, place behind
        heap: list[tuple[float, int]] = []  # minus the path's log-probability, offer: the earlier one among equals

        def offer(parent: int, depth: int, path: float, at: Place) -> None:
            for token, log_p, there in self._following(at, budget.width):
                heapq.heappush(heap, (-(path + log_p), len(offers)))
                offers.append((parent, token, depth + 1, log_p, there))

        offer(-1, 0, 0.0, place)
        while heap and len(nodes) < budget.rows - 1:
            minus_path, at = heapq.heappop(heap)
            parent, token, depth, log_p, there = offers[at]
            nodes.append((parent, token, log_p))
            if depth < budget.depth:
                offer(len(nodes) - 1, depth, -minus_path, there)
        return _draft(nodes)

    def _shaped(self, shape: tuple[tuple[int, ...], ...], place: Place) -> Draft:
        """A static tree without the ranks that there is no continuation for."""
        nodes: list[tuple[int, int, float]] = []
        made: dict[tuple[int, ...], tuple[int, list[tuple[int, float, Place]]]] = {}
        width = {path[:-1]: path[-1] + 1 for path in shape}  # in order, so that the last rank stays
        made[()] = -1, self._following(place, width.get((), 0))
        for path in shape:
            parent, following = made.get(path[:-1], (-1, []))
            if path[-1] < len(following):
                token, log_p, there = following[path[-1]]
                made[path] = len(nodes), self._following(there, width.get(path, 0))
                nodes.append((parent, token, log_p))
        return _draft(nodes)

    def _following(self, place: Place, width: int) -> list[tuple[int, float, Place]]:
        """Up to ``width`` continuations, the likeliest first: token, log-probability, place behind it.

        A match of m tokens is trusted with m/(m + 2), which is about how often its continuation was right in answers
        of the embedded target; the rest goes to the next shorter one.
        """
        seen, (state, matched) = self._seen, place
        if state == seen.last:  # drafted up to the end of the text: what was drafted goes on as the text does
            state, matched = seen.longest()
        found: dict[int, tuple[int, float, Place]] = {}
        left = 1.0
        for _ in range(FALLBACKS):
            if matched < self.shortest or len(found) >= width:
                break
            following = seen.after(state)
            total = sum(count for _, _, count in following)
            for token, there, count in following:
                p = left * matched / (matched + 2) * count / total
                found.setdefault(token, (token, math.log(p), Place(there, matched + 1)))
            left *= 2 / (matched + 2)
            state = seen.link[state]
            matched = seen.length[state]
        return sorted(found.values(), key=lambda each: -each[1])[:width]


def _draft(nodes: list[tuple[int, int, float]]) -> Draft:
    """Of (parent, token, log-probability)."""
    return Draft(
        tokens=tuple(token for _, token, _ in nodes),
        parents=tuple(parent for parent, _, _ in nodes),
        q=(None,) * len(nodes),
        scores=tuple(log_p for _, _, log_p in nodes),
    )
