"""What prompt lookup has been worth lately, by how long a match it went on from.

A match of m tokens went on as before with about m/(m + 2) in answers of the embedded target, and a drafted token that
was accepted makes the match one longer. So one table of odds by the match's length tells what a chain of any length is
worth behind any match. Lengths learn from each other: what all of them together held, beside what was expected of them,
scales what is expected of each.
"""

from __future__ import annotations

from infer.tracking import Tally

WEIGHT = 6.0  # tokens for which the prior counts
DECAY = 0.96  # of a class, each time it is tried
COMMON = 4.0  # tokens for which all classes together are taken to do as expected
IDLE = 0.99  # of classes that a round did not try: they go back to the prior
CLASSES = (1, 2, 3, 4, 6, 9, 14)  # least lengths of the classes of matches


class Matches:
    """Odds that the text goes on as after its match."""

    def __init__(self) -> None:
        self._seen = [Tally() for _ in CLASSES]
        self._held, self._missed = Tally(), Tally()  # of all classes together: what was expected, and what came

    def holds(self, match: int) -> float:
        """P(the next token is the one that followed a match of ``match`` ≥ 1 tokens)."""
        tally, prior = self._seen[_class(match)], self._expected(match)
        return (tally.held + WEIGHT * prior) / (tally.offered + WEIGHT)

    def _expected(self, match: int) -> float:
        """The prior of a length, its odds scaled by how all lengths did."""
        odds = match / 2 * _scale(self._held) / _scale(self._missed)
        return odds / (1 + odds)

    def joint(self, match: int, depth: int) -> list[float]:
        """By depth: P(a chain of so many tokens behind the match holds)."""
        chances, chance = [], 1.0
        for d in range(depth):
            chance *= self.holds(match + d)
            chances.append(chance)
        return chances

    def observe(self, match: int, drafted: int, accepted: int) -> None:
        """A chain of ``drafted`` tokens behind a match, of which the first ``accepted`` held."""
        tried: set[int] = set()
        for d in range(min(drafted, accepted + 1)):
            at, held = _class(match + d), d < accepted
            self._seen[at].count(held, DECAY)
            expected = (match + d) / (match + d + 2)
            for tally, before, came in ((self._held, expected, held), (self._missed, 1 - expected, not held)):
                tally.fade(DECAY)
                tally.offered += before
                tally.held += came
            tried.add(at)
        for at, tally in enumerate(self._seen):
            if at not in tried:
                tally.fade(IDLE)


def _scale(tally: Tally) -> float:
    return (tally.held + COMMON) / (tally.offered + COMMON)


def _class(match: int) -> int:
    return sum(match >= least for least in CLASSES) - 1
