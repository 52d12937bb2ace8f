"""Control of lookup beside another drafter, simulated without a clock: who is asked, and what it may cost."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heads.draft import Draft
from heads.grow import NOTHING, Budget
from infer import controls
from infer.beside import BesideControl, _without_copy
from infer.control import SLACK, TRIAL, AdaptiveControl
from infer.drafters import Drafter, FirstToSpeak, LookupDrafter, Merged
from infer.lookahead import CostTable
from infer.metrics import Round
from tests.infer.oracles import Oracle
from tests.infer.test_control import CHEAP, FLAT

TABLE = CostTable(rows=FLAT, drafts={(1, 1): 0.008, (3, 1): 0.016, (1, 8): 0.008, (3, 8): 0.02}, context=100)
Match = Callable[[int], int]  # round -> how long lookup's match is


class World:
    """Rounds of a control where each token of a copy, and of the other drafter, holds by a chance of its own."""

    def __init__(self, control: BesideControl, match: Match, copied: float, other: float, table: CostTable = TABLE):
        self.control, self.match, self.table = control, match, table
        self.odds = {"lookup": copied, "heads": other}
        self.draw = random.Random(1)
        self.asked: list[Budget] = []
        self.seconds = self.tokens = 0.0

    def run(self, rounds: int) -> World:
        for at in range(rounds):
            budget = self.control.budget(1, self.match(at))
            copy, other = budget.parts or (NOTHING, NOTHING)
            tokens: list[int] = []
            parents: list[int] = []
            sources: list[str] = []
            for name, part in (("lookup", copy), ("heads", other)):
                for depth in range(part.depth):
                    parents.append(-1 if depth == 0 else len(tokens) - 1)
                    tokens.append(len(tokens))
                    sources.append(name)
            draft = Draft(tuple(tokens), tuple(parents), (None,) * len(tokens), sources=tuple(sources))
            path: list[int] = []
            for name, first, part in (("lookup", 0, copy), ("heads", copy.depth, other)):
                while not path or len(path) < part.depth:
                    if len(path) >= part.depth or self.draw.random() >= self.odds[name]:
                        break
                    path.append(first + len(path))
                if path:
                    break
            self.asked.append(budget)
            self.seconds += self.table.target(1 + len(draft)) + self.table.draft(other.depth, other.width)
            self.tokens += 1 + len(path)
            self.control.observe(draft, path, Round(len(draft), budget.depth, len(path), 1 + len(path)))
        return self

    def share(self, part: int, start: int = 0) -> float:
        """Of the rounds from ``start`` on, those in which a part was asked."""
        rounds = self.asked[start:]
        return sum(budget.parts[part].depth > 0 if budget.parts else False for budget in rounds) / len(rounds)

    def over_plain(self) -> float:
        return self.seconds / (self.tokens * self.table.target(1))


def control(**changed: Any) -> BesideControl:
    return BesideControl(TABLE, 13, **{"copies": 10, "other": 3, "tree_rows": (4, 8), **changed})


def test_a_long_match_that_holds_is_copied_and_the_other_is_not_asked() -> None:
    world = World(control(), lambda at: 9, copied=0.95, other=0.5).run(100)
    assert world.share(0) > 0.97 and world.share(1) < 0.05
    assert max(budget.depth for budget in world.asked) == 10
    assert world.over_plain() < 0.25


def test_without_a_match_the_other_drafts() -> None:
    world = World(control(), lambda at: 0, copied=1.0, other=0.7).run(100)
    assert world.share(0) == 0.0 and world.share(1, 10) == 1.0


def test_matches_that_do_not_hold_are_left_to_the_other() -> None:
    world = World(control(), lambda at: 3, copied=0.02, other=0.8).run(200)
    assert world.share(1, 60) > 0.85 and world.share(0, 60) < 0.3


@pytest.mark.parametrize("copied", [0.0, 0.9])
def test_another_that_is_always_wrong_is_hardly_asked(copied: float) -> None:
    world = World(control(), lambda at: 4 * (at % 2), copied=copied, other=0.0).run(600)
    assert world.share(1, 50) < 0.05
    assert world.seconds <= (1 + SLACK) * world.tokens * TABLE.target(1) + TRIAL * TABLE.target(1)


@settings(max_examples=40, deadline=None)
@given(
    copied=st.floats(0, 1),
    other=st.floats(0, 1),
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=8),
    merges=st.booleans(),
    step=st.floats(0.001, 0.2),
)
def test_what_may_be_lost_is_bounded(
    copied: float, other: float, lengths: list[int], merges: bool, step: float
) -> None:
    table = CostTable(rows=FLAT, drafts={(1, 1): step, (3, 1): 3 * step, (1, 8): step, (3, 8): 3 * step}, context=1)
    watched = BesideControl(table, 13, copies=10, other=3, merges=merges, tree_rows=(4, 8, 16))
    world = World(watched, lambda at: lengths[at % len(lengths)], copied, other, table).run(150)
    assert world.seconds <= ((1 + SLACK) * world.tokens + TRIAL) * table.target(1) * (1 + 1e-9)


def test_both_draft_where_they_can_be_merged_and_rows_are_cheap() -> None:
    drafts = {(1, 1): 0.01, (3, 1): 0.03, (1, 8): 0.01, (3, 8): 0.03}
    flat = CostTable(rows={1: 1.0, 64: 1.05}, drafts=drafts, context=1)
    one, both = (BesideControl(flat, 13, copies=10, other=3, merges=merges, tree_rows=(8,)) for merges in (False, True))
    for watched, expected in ((one, 0.0), (both, 1.0)):
        asked = [World(watched, lambda at: 2, 0.5, 0.5, flat).run(40).asked[-1]]
        assert all(all(part.depth for part in budget.parts) for budget in asked) == bool(expected)


def test_rows_are_kept_within_what_was_asked_for() -> None:
    world = World(control(rows=6, merges=True, tree_rows=(4,)), lambda at: 5, copied=0.9, other=0.9).run(60)
    assert max(budget.rows for budget in world.asked) <= 6


def test_lookup_alone_plays_by_the_same_rules() -> None:
    table = CostTable(rows={1: 0.04, 2: 0.05, 64: 0.5}, drafts={}, context=1)
    watched = BesideControl(table, 10, copies=10, other=0, name="")
    for length, held in ((9, True), (9, False)):
        for _ in range(40):
            budget = watched.budget(1, length)
            draft = Draft.chain(range(budget.depth))
            path = list(range(len(draft))) if held else []
            watched.observe(draft, path, Round(len(draft), len(draft), len(path), 1 + len(path)))
        assert watched.budget(1, length).depth == (10 if held else 0)
    assert watched.budget(1, 0).depth == 0


def test_texts_decoded_together_share_a_budget_whatever_their_matches() -> None:
    watched = control()
    first = watched.budget(4, 9)
    assert first == watched.budget(4, 0) == watched.budget(4, 2) and not first.parts


def test_what_the_other_drafted_beside_a_copy_is_counted_as_its_own() -> None:
    """Nodes 0-1 are copied, 2-4 are a tree of the other's; 5 hangs from a copied token."""
    draft = Draft(
        (10, 11, 20, 21, 22, 30), (-1, 0, -1, -1, 2, 0), (None,) * 6, sources=("lookup",) * 2 + ("heads",) * 4
    )
    rest, path = _without_copy(draft, [2, 4], 2)
    assert (rest.tokens, rest.parents, path) == ((20, 21, 22), (-1, -1, 0), [0, 2])
    assert rest.sources == ("heads",) * 3


def drafter_of(kind: str) -> Drafter:
    other = Oracle(torch.ones(1, 9, dtype=torch.long), lookahead=2)
    made: dict[str, Callable[[], Drafter]] = {
        "lookup": LookupDrafter,
        "other": lambda: other,
        "first": lambda: FirstToSpeak([LookupDrafter(), other], ["lookup", "other"]),
        "merged": lambda: Merged([LookupDrafter(), other], ["lookup", "other"]),
        "turned": lambda: Merged([other, LookupDrafter()], ["other", "lookup"]),
        "three": lambda: FirstToSpeak([LookupDrafter(), other, other], ["lookup", "a", "b"]),
    }
    return made[kind]()


@pytest.mark.parametrize(
    ("kind", "merges"),
    [("lookup", False), ("first", False), ("merged", True), ("other", None), ("turned", None), ("three", None)],
)
def test_which_drafters_get_it(kind: str, merges: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    priced: list[Drafter] = []

    def stored(target: Any, drafter: Drafter, prompt: Any) -> CostTable:
        priced.append(drafter)
        return CHEAP

    monkeypatch.setattr(controls, "stored_costs", stored)
    drafter = drafter_of(kind)
    target: Any = SimpleNamespace(by_place=None)
    made = controls.make(target, drafter, torch.ones(1, 1), seed=1)
    assert type(made) is (AdaptiveControl if merges is None else BesideControl)
    if isinstance(made, BesideControl):
        assert made._merges == merges
        assert priced == [drafter if kind == "lookup" else drafter.parts[1]]  # type: ignore[attr-defined]


def test_a_draft_of_both_takes_no_longer_than_the_other_can_draft() -> None:
    """Texts decoded together are given whole budgets, up to 13 deep; the other drafter, 3 deep, is what takes time."""
    watched = control()
    seconds = {budget.depth: seconds for budget, _, seconds in watched._expected(4) if budget.width == 1}
    rows = {depth: TABLE.target(depth + 1, 4) for depth in seconds}
    assert max(seconds) == 13
    assert seconds[13] - seconds[3] < rows[13] - rows[3] + 1e-9


@pytest.mark.parametrize("kind", ["other", "merged", "first"])
def test_targets_that_read_chains_only_are_given_no_trees(kind: str) -> None:
    made = controls.choose(drafter_of(kind), CHEAP, trees=False)
    assert made is not None and controls.choose(drafter_of(kind), CHEAP) is not None
    ways = list(made._expected(1))
    if isinstance(made, BesideControl):
        made.budget(1, 5)
        ways += list(made._expected(1))
    assert all(budget.width == 1 for budget, _, _ in ways)
    assert any(budget.width > 1 for budget, _, _ in controls.choose(drafter_of(kind), CHEAP)._expected(1))  # type: ignore[union-attr]
