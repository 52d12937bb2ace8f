"""The suffix automaton against a rescan of the text; its work per token does not grow with the text."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heads.grow import Budget
from infer.drafters import LookupDrafter, automaton, lookup
from infer.drafters.automaton import DEEPEST, MOST, SuffixAutomaton
from tests.infer.fakes import TableTarget, table

SETTINGS = settings(max_examples=150, deadline=None, derandomize=True)
TEXTS = st.integers(1, 4).flatmap(lambda most: st.lists(st.integers(0, most), min_size=1, max_size=DEEPEST - 2))


def grown(text: Sequence[int]) -> SuffixAutomaton:
    seen = SuffixAutomaton()
    for token in text:
        seen.append(token)
    return seen


def ends(text: Sequence[int], string: Sequence[int], before: int) -> list[int]:
    """Where ``string`` ends in the text, at an index below ``before``."""
    n = len(string)
    return [end for end in range(n - 1, before) if list(text[end - n + 1 : end + 1]) == list(string)]


def rescan(text: Sequence[int]) -> int:
    """Length of the longest suffix that occurs before."""
    last = len(text) - 1
    return max(n for n in range(len(text)) if n == 0 or ends(text, text[-n:], last))


@SETTINGS
@given(TEXTS)
def test_matches_are_those_of_a_rescan(text: list[int]) -> None:
    seen, last = SuffixAutomaton(), len(text) - 1
    for at, token in enumerate(text):
        seen.append(token)
        assert seen.longest()[1] == rescan(text[: at + 1])
    state, length = seen.longest()
    while length:
        string = text[-length:]
        earlier = ends(text, string, last)
        assert seen.latest(state) == max(earlier)
        following = seen.after(state)
        assert following[0][0] == text[max(earlier) + 1]
        assert sorted(token for token, _, _ in following) == sorted({text[end + 1] for end in earlier})
        for token, there, count in following:
            assert count == max(1, len(ends(text, [*string, token], last)))
            assert ends(text, [*string, token], last + 1) == ends(text, _string(seen, there), last + 1)
        state = seen.link[state]
        length = seen.length[state]


def _string(seen: SuffixAutomaton, state: int) -> list[int]:
    """A state's longest string."""
    end = seen.latest(state)
    return seen.text[end - seen.length[state] + 1 : end + 1]


@SETTINGS
@given(TEXTS)
def test_every_substring_has_its_state(text: list[int]) -> None:
    """The states' classes hold as many strings as the text has substrings, and there are at most two a token."""
    seen = grown(text)
    substrings = {tuple(text[i:j]) for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
    states = range(1, len(seen.length))
    assert sum(seen.length[state] - seen.length[seen.link[state]] for state in states) == len(substrings)
    assert len(seen.length) <= max(2, 2 * len(text))


@pytest.mark.parametrize("period", [1, 2, 7])
def test_far_more_repetitions_than_are_counted(period: int) -> None:
    """Matches stay exact; occurrences of short ones may be older ones, but are occurrences."""
    text = [at % period for at in range(20 * DEEPEST)]
    seen = grown(text)
    state, length = seen.longest()
    assert (length, seen.latest(state)) == (len(text) - period, len(text) - 1 - period)
    while length:
        end = seen.latest(state)
        assert text[end - length + 1 : end + 1] == text[-length:] and end < len(text) - 1
        state = seen.link[state]
        length = seen.length[state]


def test_no_more_continuations_than_are_looked_at() -> None:
    text = [token for other in range(1, 3 * MOST) for token in (0, other)]
    seen = grown([*text, 0])
    state, length = seen.longest()
    assert length == 1
    following = [token for token, _, _ in seen.after(state)]
    assert following == list(range(3 * MOST - 1, 2 * MOST - 1, -1))  # the latest


# work per token


FILES = {automaton.__file__, lookup.__file__, __file__}


def lines(run: Callable[[], Any]) -> int:
    """Lines of the lookup (and of this file) that ``run`` executes."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in FILES:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def a_text(kind: str, n: int) -> list[int]:
    draw = random.Random(0)
    return {
        "one token": lambda: [5] * n,
        "period 7": lambda: [at % 7 for at in range(n)],
        "two tokens": lambda: [draw.randrange(2) for _ in range(n)],
        "many tokens": lambda: [draw.randrange(50) for _ in range(n)],
        "like text": lambda: [int(draw.paretovariate(0.7)) % 1000 for _ in range(n)],
        "all new": lambda: list(range(n)),
    }[kind]()


TARGET: Any = TableTarget(table(2, 0), 2)
ROUNDS = 40


def work(drafter: Any, text: list[int]) -> float:
    """Lines a round, over the last rounds of a text, of reading a token and drafting a chain and a tree."""
    drafter.begin(TARGET, torch.tensor([text[:-ROUNDS]]), None)

    def run() -> None:
        for token in text[-ROUNDS:]:
            drafter.commit(None, [token])
            drafter.propose(Budget.chain(8), None)
            drafter.propose(Budget(rows=16, depth=6, width=4), None)

    return lines(run) / ROUNDS


KINDS = ["one token", "period 7", "two tokens", "many tokens", "like text", "all new"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_costs_the_same_behind_a_context_eight_times_as_long(kind: str) -> None:
    short, long = work(LookupDrafter(1), a_text(kind, 1500)), work(LookupDrafter(1), a_text(kind, 12000))
    assert long <= 1.5 * short + 10


@pytest.mark.parametrize("kind", KINDS)
def test_reading_costs_the_same_for_each_token(kind: str) -> None:
    short, long = lines(lambda: grown(a_text(kind, 500))) / 500, lines(lambda: grown(a_text(kind, 4000))) / 4000
    assert long <= 1.5 * short + 10


class Rescanning(LookupDrafter):
    """What other implementations do."""

    def commit(self, taps: Any, ids: list[int]) -> None:
        self.seen = [*getattr(self, "seen", []), *ids]

    def propose(self, budget: Budget, sampler: Any) -> Any:
        for at in range(len(self.seen) - 2):
            if self.seen[at] == self.seen[-1]:
                return self.seen[at + 1 :][: budget.depth]
        return []


def test_a_rescan_would_be_seen() -> None:
    assert work(Rescanning(1), a_text("all new", 2000)) > 5 * work(Rescanning(1), a_text("all new", 250))
