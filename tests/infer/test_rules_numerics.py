"""Where numbers are narrow, padded or all but certain: no NaN, nothing lost, decisions in float32."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from heads.draft import Draft
from heads.grow import Budget
from infer.processors import NodeScores
from infer.rule import residual, share_kept
from infer.tokens import Tokens
from infer.verify import RULES, Chooser
from tests.infer.exact import (
    Make,
    TableAt,
    Text,
    World,
    check_law,
    completed,
    distance,
    drafts_of,
    grown,
    round_of,
    target_law,
)

FORK = Budget.static([(0,), (1,), (0, 0), (1, 0)])
PAIRS = [("token", Budget.chain(2)), ("block", Budget.chain(2)), ("token", FORK), ("traversal", FORK)]
NAMES = ["token, chain", "block, chain", "token, fork", "traversal, fork"]


def shorter(world: World, budget: Budget) -> Make:
    """A drafter whose vocabulary lacks the target's last entries, as padded output matrices have them."""
    narrow = World(world.vocab, world.seed, world.order, world.opposed)
    logits = narrow.draft_logits
    narrow.draft_logits = lambda text: logits(text)[:-2]  # type: ignore[method-assign]
    return grown(narrow, budget)


@pytest.mark.parametrize(("rule", "budget"), PAIRS, ids=NAMES)
def test_a_target_with_more_entries_than_the_drafter(rule: str, budget: Budget) -> None:
    """What the drafter has no entry for keeps its probability, and is said too."""
    world = World(5, seed=1)
    check_law(RULES[rule], shorter(world, budget), world, 3)


@pytest.mark.parametrize(("rule", "budget"), PAIRS, ids=NAMES)
def test_float32_is_enough_and_half_precision_is_not(rule: str, budget: Budget) -> None:
    world = World(4, seed=1)
    text = world.contexts()[0]
    drafts = drafts_of(grown(world, budget), text)
    lawful = target_law(world.target, text, 3, 4)

    def off(p_after: Callable[[Text], Tensor]) -> float:
        return distance(completed(round_of(RULES[rule], drafts, p_after, text), world.target, text, 3, 4), lawful)

    assert off(lambda prefix: world.target(prefix).float()) < 1e-6
    assert off(lambda prefix: world.target.logits(prefix).bfloat16().softmax(-1)) > 1e-4


def test_scores_of_a_half_precision_target_are_decided_in_float32() -> None:
    logits = torch.randn(3, 50_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    at = NodeScores(LogitsProcessorList(), logits, Draft.chain([1, 2]), Tokens(torch.tensor([[1]])))
    for node in (-1, 0, 1):
        assert at.p(node).dtype == at.peek(node).dtype == torch.float32
        assert float(at.p(node).double().sum()) == pytest.approx(1, abs=1e-5)
        assert torch.equal(at.p(node), at.peek(node))
        rounded = logits[node + 1].softmax(-1).float()
        assert float((rounded / at.p(node) - 1).abs().max()) > 1e-3, "in half precision it would be another law"


class Suspicious:
    """Takes random decisions and looks at everything it is asked."""

    def __init__(self, seed: int, stubborn: bool = False) -> None:
        self.generator, self.stubborn = torch.Generator().manual_seed(seed), stubborn

    def accept(self, probability: float) -> bool:
        assert 0 <= probability <= 1, probability
        if self.stubborn:  # rejects whatever is not certain
            return probability == 1
        return float(torch.rand((), generator=self.generator)) < probability

    def sample(self, distribution: Tensor) -> int:
        assert bool(torch.isfinite(distribution).all()) and float(distribution.min()) >= 0
        assert float(distribution.double().sum()) == pytest.approx(1, abs=1e-4)
        return int(torch.multinomial(distribution, 1, generator=self.generator))


CERTAIN = torch.tensor([40.0, 0.0, -40.0, -90.0])
EDGES: dict[str, tuple[Tensor, Tensor]] = {
    "equal": (torch.tensor([1.0, 0.5, 0.0, -1.0]), torch.tensor([1.0, 0.5, 0.0, -1.0])),
    "both certain": (CERTAIN, CERTAIN),
    "certain, of another token": (CERTAIN, CERTAIN.flip(0)),
    "certain draft": (torch.zeros(4), CERTAIN),
    "certain target": (CERTAIN, torch.zeros(4)),
    "a hair apart": (torch.tensor([17.0, 0.0, 0.0, 0.0]), torch.tensor([17.0001, 0.0, 0.0, 0.0])),
    "filtered": (torch.tensor([1.0, -math.inf, 0.0, -math.inf]), torch.tensor([0.0, 1.0, 0.0, 1.0])),
    "nothing in common": (
        torch.tensor([1.0, -math.inf, 0.0, -math.inf]),
        torch.tensor([-math.inf, 1.0, -math.inf, 1.0]),
    ),
    "one token left": (
        torch.tensor([-math.inf, 0.0, -math.inf, -math.inf]),
        torch.tensor([-math.inf, 0.0, -math.inf, -math.inf]),
    ),
}


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize(("rule", "budget"), PAIRS, ids=NAMES)
@pytest.mark.parametrize("stubborn", [False, True])
def test_nothing_is_ever_nan(rule: str, budget: Budget, edge: str, stubborn: bool) -> None:
    """Also where rounding alone rejects: the residual of nothing is p."""
    target, drafter = EDGES[edge]
    world = World(4, seed=0)
    world.draft_logits = lambda text: drafter  # type: ignore[method-assign]
    p = target.softmax(-1)
    for seed in range(10):
        chooser: Chooser = Suspicious(seed, stubborn)
        draft = grown(world, budget)(Suspicious(seed), ())
        path, token = RULES[rule](draft, TableAt(lambda text: p, (), draft), chooser)
        emitted = [*(draft.tokens[node] for node in path), token]
        assert all(p[name] > 0 for name in emitted), "nothing the target excludes is said"


def test_residuals_by_hand() -> None:
    p, q = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.4, 0.3, 0.2, 0.1])
    left, mass = residual(p, q)
    assert left.tolist() == pytest.approx([0, 0, 0.25, 0.75]) and mass == pytest.approx(0.4)
    left, mass = residual(p, q, 0.75)
    assert left.tolist() == pytest.approx([0, 0, 1 / 9, 8 / 9]) and mass == pytest.approx(0.225)
    assert share_kept(0.225, 0.75) == pytest.approx(0.225 / 0.475)
    left, mass = residual(p, p)
    assert left is p and mass == 0
    assert share_kept(0.0, 1.0) == 1.0 and share_kept(0.0, 0.5) == 0.0
