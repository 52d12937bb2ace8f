"""How much each rule accepts, exactly: block and traversal never less than rules that walk down from the root."""

from __future__ import annotations

import pytest

from heads.grow import Budget
from infer.verify import RULES
from tests.infer.exact import World, drafts_of, grown, round_of, worlds
from tests.infer.mixed import chosen_first, chosen_last, mixed_chain

EQUAL = 1e-12


def accepted(rules: tuple[str, ...], world: World, make_of: object, place: int = 0) -> list[float]:
    """Expected number of accepted tokens of a round under each rule."""
    context = world.contexts()[place]
    drafts = drafts_of(make_of(world), context)  # type: ignore[operator]
    return [round_of(RULES[rule], drafts, world.target, context).accepted for rule in rules]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_block_accepts_at_least_as_much_of_a_chain(depth: int) -> None:
    gains = []
    for world in worlds(24, vocab=3):
        token, block, traversal = accepted(
            ("token", "block", "traversal"), world, lambda world: grown(world, Budget.chain(depth)), world.seed % 3
        )
        assert block == pytest.approx(traversal, abs=EQUAL), "on chains the two are one rule"
        gains.append(block - token)
    assert min(gains) >= -EQUAL
    if depth == 1:
        assert max(gains) <= EQUAL, "a single token leaves nothing to make up for"
    else:
        assert max(gains) > 0.05


def test_block_accepts_at_least_as_much_of_a_mixed_chain() -> None:
    pairs = [accepted(("token", "block"), world, mixed_chain) for world in worlds(12, vocab=3)]
    assert all(block >= token - EQUAL for token, block in pairs)
    assert any(block > token + 0.01 for token, block in pairs)


TREES = {
    "fork": Budget.static([(0,), (1,), (0, 0), (1, 0)]),
    "stem": Budget.static([(0,), (0, 0), (0, 1)]),
    "bushy": Budget.static([(0,), (1,), (0, 0), (0, 1), (1, 0)]),
    "deep": Budget.static([(0,), (0, 0), (0, 1), (0, 0, 0)]),
    "by confidence": Budget(rows=5, depth=3, width=2),
}


@pytest.mark.parametrize("shape", TREES)
def test_traversal_accepts_at_least_as_much_of_a_drawn_tree(shape: str) -> None:
    pairs = [
        accepted(("token", "traversal"), world, lambda world: grown(world, TREES[shape]), world.seed % 3)
        for world in worlds(8, vocab=3)
    ]
    assert all(traversal >= token - EQUAL for token, traversal in pairs)
    assert any(traversal > token + 0.01 for token, traversal in pairs)


@pytest.mark.parametrize("make", [chosen_first, chosen_last])
def test_traversal_accepts_at_least_as_much_of_a_mixed_tree(make: object) -> None:
    pairs = [accepted(("token", "traversal"), world, make) for world in worlds(8, vocab=3)]
    assert all(traversal >= token - EQUAL for token, traversal in pairs)


def test_chosen_drafts_leave_nothing_to_gain() -> None:
    """Where nothing was sampled all rules accept the same: the one that looks at least is as good as any."""
    for world in worlds(12, vocab=4):
        for budget in (Budget.chain(3), TREES["bushy"], TREES["by confidence"]):
            siblings, token, traversal = accepted(
                ("siblings", "token", "traversal"),
                world,
                lambda world: grown(world, budget, draw=False),  # noqa: B023
            )
            assert token == pytest.approx(siblings, abs=EQUAL)
            assert traversal == pytest.approx(siblings, abs=EQUAL)


def test_two_drawn_siblings_accept_more_than_one() -> None:
    """And a draw without replacement at least what a second one of the same q would."""
    for world in worlds(8, vocab=4):
        one, two = (
            accepted(("token",), world, lambda world: grown(world, Budget.static(shape)))[0]  # noqa: B023
            for shape in ([(0,)], [(0,), (1,)])
        )
        assert two > one
