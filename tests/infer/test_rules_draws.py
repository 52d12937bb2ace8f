"""Goodness of fit over hundreds of thousands of rounds with drafts that oppose the target; planted bugs must show.

Rounds are drawn by counts: at each decision it is drawn how many of the rounds that got there go which way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

import infer.block
import infer.traversal
from heads.grow import Budget
from infer import verify
from infer.law import Observed, compare
from infer.rule import residual
from infer.verify import RULES, Rule
from tests.infer.counted import draw_rounds
from tests.infer.exact import Make, Text, World, grown
from tests.infer.mixed import chosen_last, told
from tests.infer.test_rules_law import redraws

DRAWS = 400_000
FORK = Budget.static([(0,), (1,), (0, 0), (1, 0)])
DRAFTS: dict[str, Callable[[World], Make]] = {
    "chain": lambda world: grown(world, Budget.chain(2)),
    "fork": lambda world: grown(world, FORK),
    "chosen": lambda world: grown(world, FORK, draw=False),
    "mixed": chosen_last,
}
FAIR = [
    ("token", "chain"),
    ("token", "fork"),
    ("token", "mixed"),
    ("block", "chain"),
    ("traversal", "chain"),
    ("traversal", "fork"),
    ("traversal", "mixed"),
    ("siblings", "chosen"),
]


def fits(rule: Rule, make: Make, world: World, text: Text) -> bool:
    """Chi-square of the first and of the second token, each behind what came before it."""
    emitted, rejected = draw_rounds(rule, make, world.target, text, DRAWS)
    assert emitted.total() == DRAWS and rejected >= 0.3 * DRAWS
    seen = Observed()
    for block, count in emitted.items():
        for at, token in enumerate(block[:2]):
            seen.counts.setdefault(block[:at], Counter())[token] += count
    law = {context: world.target((*text, *context)) for context in seen.counts}
    tests = [compare(seen, law, position) for position in (0, 1)]
    assert all(test.draws > 0 and test.df > 0 for test in tests)
    return all(test.passed for test in tests)


@pytest.mark.parametrize(("rule", "draft"), FAIR)
def test_the_law_fits(rule: str, draft: str) -> None:
    world = World(4, seed=4)
    for text in world.contexts()[:2]:
        assert fits(RULES[rule], DRAFTS[draft](world), world, text)


def a_tenth_off(p: torch.Tensor, q: torch.Tensor, weight: float = 1.0) -> tuple[torch.Tensor, float]:
    """A residual that is a little wrong: a tenth of p is mixed in."""
    left, mass = residual(p, q, weight)
    return 0.9 * left + 0.1 * p, mass


@pytest.mark.parametrize(("rule", "draft"), FAIR)
def test_a_small_fault_shows(rule: str, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A residual ten per cent off: far less than any of the bugs that real projects had."""
    world, mutated = World(4, seed=4), RULES[rule]
    if rule == "siblings":
        mutated = redraws
    for module in (verify, infer.block, infer.traversal):
        monkeypatch.setattr(module, "residual", a_tenth_off)
    assert not fits(mutated, DRAFTS[draft](world), world, world.contexts()[0])


@pytest.mark.parametrize(("rule", "draft"), [("token", "chain"), ("block", "chain"), ("traversal", "fork")])
def test_a_q_a_little_too_warm_shows(rule: str, draft: str) -> None:
    """Drawn at temperature 1, told as if at 1.1."""
    world = World(4, seed=4)
    make = told(DRAFTS[draft](world), lambda draft, node, q: q ** (1 / 1.1) / (q ** (1 / 1.1)).sum())
    assert not fits(RULES[rule], make, world, world.contexts()[0])
