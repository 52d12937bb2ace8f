"""A suffix automaton of a growing text: where has what just happened happened before, and what came next?

Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985), built online. A state stands for
all strings that end at the same places of the text; its link leads to the longest of their suffixes that also ends
elsewhere. So behind the last token the link of the last state *is* the longest suffix that occurred before::

      text  a b c a b                 last state: "abcab", "bcab", "cab"
                                      its link:   "ab", "b"   ends at 1 (and 4), was followed by c

Each token costs a constant amount of work on average, however long the text is, and there are at most two states and
three transitions a token.
"""

from __future__ import annotations

from itertools import islice

DEEPEST = 32  # suffixes that learn of their latest occurrence, longest first: more there are only in a text like aaaa…
MOST = 16  # continuations of a state that are looked at, the first followed last


class SuffixAutomaton:
    """Occurrences of every substring of a text that grows at its end. State 0 is the empty string."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self.link: list[int] = [-1]
        self.length: list[int] = [0]  # of the state's longest string
        self._next: list[dict[int, int]] = [{}]
        # occurrences that something followed: where the latest ends, and how many there are (1 before the first)
        self._latest: list[int] = [-1]
        self._count: list[int] = [0]
        self.last = 0  # the state of the whole text

    def append(self, token: int) -> None:
        """The text goes on."""
        self._count_end()
        at, state = len(self.text), self.last
        self.text.append(token)
        new = self._add({}, at + 1, 0, at, 1)
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self.link[state]
        if state >= 0:
            self.link[new] = self._exactly(state, token)
        self.last = new

    def _count_end(self) -> None:
        """The end of the text so far is about to be followed: an occurrence like any other."""
        end, state = len(self.text) - 1, self.link[self.last]
        for _ in range(DEEPEST):
            if state <= 0:
                break
            self._latest[state] = end
            self._count[state] += 1
            state = self.link[state]

    def _exactly(self, state: int, token: int) -> int:
        """The state whose longest string is ``state``'s and ``token``; split off from a longer one if need be.

        Transitions copied here stay, and all together there are at most three a token.
        """
        longer = self._next[state][token]
        if self.length[longer] == self.length[state] + 1:
            return longer
        split = self._add(
            dict(self._next[longer]),
            self.length[state] + 1,
            self.link[longer],
            self._latest[longer],
            self._count[longer],
        )
        self.link[longer] = split
        while state >= 0 and self._next[state].get(token) == longer:
            self._next[state][token] = split
            state = self.link[state]
        return split

    def _add(self, after: dict[int, int], length: int, link: int, latest: int, count: int) -> int:
        self._next.append(after)
        self.length.append(length)
        self.link.append(link)
        self._latest.append(latest)
        self._count.append(count)
        return len(self.length) - 1

    def longest(self) -> tuple[int, int]:
        """The longest suffix of the text that occurred before: its state and length, ``(0, 0)`` for none."""
        state = max(self.link[self.last], 0)
        return state, self.length[state]

    def latest(self, state: int) -> int:
        """Index in the text at which the latest followed occurrence of ``state`` ends."""
        return self._latest[state]

    def after(self, state: int) -> list[tuple[int, int, int]]:
        """What followed a string that is not empty: (token, state with that token, how often it was followed in turn).

        The token that came last stands first, then those that were new latest; ``MOST`` of all.
        """
        following = self._next[state]
        if not following:
            return []
        recent = self.text[self._latest[state] + 1]
        others = (token for token in reversed(following) if token != recent)
        return [
            (token, following[token], self._count[following[token]]) for token in (recent, *islice(others, MOST - 1))
        ]
