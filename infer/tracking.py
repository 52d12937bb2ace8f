"""What a drafter has been worth lately: acceptance by source, depth and rank, exponentially decayed.

A *speaker* is the source, or the sources merged, that a round's draft came from (``Draft.sources``); a hybrid's lookup
and heads are told apart, since which of them speaks changes with the text much faster than how well each does. Nodes
that were drawn and nodes that were chosen are counted apart, since the target accepts them by different odds.

Before anything is known a first draft is given even odds and a deeper one those of the depth above it, as if it had
been seen ``WEIGHT`` times; a child of rank r ≥ 1 a third of what its better siblings leave over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from heads.draft import Draft
from heads.grow import Budget

FIRST, NEXT_RANK, WEIGHT = 0.5, 1 / 3, 2.0
DECAY = 0.96  # of acceptance, a round: about the last 25 rounds count
SPEAKER_DECAY = 0.9  # of who speaks: about the last 10
IDLE = 0.985  # of places that a round did not try: they go back to the odds above them
STALE = 0.5  # of everything, when a draft was taken that was not expected to be

Speaker = tuple[str, ...]


@dataclass
class Tally:
    """Decayed counts of something that was on offer and of how often it held."""

    offered: float = 0.0
    held: float = 0.0

    def count(self, held: bool, decay: float = DECAY) -> None:
        """One more."""
        self.offered = self.offered * decay + 1.0
        self.held = self.held * decay + held

    def rate(self, prior: float) -> float:
        """Share that held, the prior counting ``WEIGHT`` times."""
        return (self.held + prior * WEIGHT) / (self.offered + WEIGHT)

    def fade(self, factor: float) -> None:
        """Let what was seen count for less."""
        self.offered *= factor
        self.held *= factor


@dataclass
class Voice:
    """What is known of one speaker.

    Attributes:
        ranks: ``(drawn, depth, rank)`` -> how often the target took that child, given that it took the path to it.
        reach: depth -> how often a chain that was allowed so deep went so deep.
        share: decayed weight of the rounds it spoke in.
        silent: it is the one that has nothing to say.
    """

    ranks: dict[tuple[bool, int, int], Tally] = field(default_factory=dict)
    reach: dict[int, Tally] = field(default_factory=dict)
    share: float = 0.0
    silent: bool = False

    def acceptance(self, drawn: bool, depth: int, width: int = 1) -> list[list[float]]:
        """``[d][r]``: P(the target takes the child of rank r | the path to it), d < ``depth``, r < ``width``."""
        if self.silent:
            return [[0.0] * width] * depth
        table = []
        prior = FIRST
        for d in range(depth):
            row: list[float] = []
            left = 1.0
            for rank in range(width):
                tally = self.ranks.get((drawn, d, rank))
                guess = min(prior, left) if rank == 0 else left * NEXT_RANK
                rate = min(guess if tally is None else tally.rate(guess), left)
                row.append(rate)
                left -= rate
            table.append(row)
            prior = row[0]
        return table

    def reaches(self, depth: int) -> list[float]:
        """P(a chain allowed ``depth`` tokens is at least 1, 2, … deep); falling."""
        if self.silent:
            return [0.0] * depth
        found, most = [], 1.0
        for d in range(1, depth + 1):
            tally = self.reach.get(d)
            most = most if tally is None else min(most, tally.rate(most))
            found.append(most)
        return found


class Tracker:
    """Counts what became of drafts.

    Attributes:
        voices: by speaker; ``()`` is a drafter that had nothing to say.
    """

    def __init__(self) -> None:
        self.voices: dict[Speaker, Voice] = {}
        self._drawn = {False: False, True: False}  # of chains, of trees: what the last one was

    def drawn(self, tree: bool) -> bool:
        """Whether drafts of that kind are drawn, as far as seen."""
        return self._drawn[tree]

    def observe(self, asked: Budget, draft: Draft, path: Sequence[int], fade: float = 1.0) -> None:
        """Count a round.

        Args:
            asked: the budget it was drafted under, deeper than 0.
            draft: what came.
            path: accepted nodes, from the root downwards.
            fade: weight of what this speaker did before, beyond the usual decay.
        """
        speaker = tuple(dict.fromkeys(draft.sources)) if draft.sources else (("drafter",) if len(draft) else ())
        voice = self.voices.setdefault(speaker, Voice(silent=not speaker))
        for other in self.voices.values():
            other.share *= SPEAKER_DECAY
        voice.share += 1.0
        if fade < 1.0:
            for tally in voice.ranks.values():
                tally.fade(fade)
        if len(draft):
            self._drawn[asked.width > 1] = draft.q[0] is not None
        if asked.width == 1 and (asked.floors or not draft.trust):  # one drafted whole says nothing of those that end
            deepest = max(draft.depths, default=0)
            for depth in range(1, asked.depth + 1 if speaker else 1):
                voice.reach.setdefault(depth, Tally()).count(depth <= deepest)
        tried = dict(_ranks(asked, draft, path))
        for place, tally in voice.ranks.items():
            if place not in tried:
                tally.fade(IDLE)
        for place, held in tried.items():
            voice.ranks.setdefault(place, Tally()).count(held)

    def shares(self) -> list[tuple[float, Voice]]:
        """Each speaker with the probability that it speaks next; one that is unknown where nothing was seen."""
        total = sum(voice.share for voice in self.voices.values())
        return [(voice.share / total, voice) for voice in self.voices.values()] if total else [(1.0, Voice())]


def _ranks(asked: Budget, draft: Draft, path: Sequence[int]) -> Iterator[tuple[tuple[bool, int, int], bool]]:
    """The places that the accepted path passed, and whether the target took them."""
    width = asked.width if asked.width > 1 and draft.is_chain else 0  # places a drafter of chains leaves empty
    node = -1
    for depth in range(len(path) + 1):
        children = draft.children(node)
        if not children:
            return
        taken = path[depth] if depth < len(path) else -1
        for rank, child in enumerate(children):
            yield (draft.q[child] is not None, depth, rank), child == taken
        for rank in range(len(children), width):
            yield (draft.q[children[0]] is not None, depth, rank), False
        node = taken
