"""The search for layers finds the ones that do nothing, and adds up what they would gain."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from heads.grow import Budget
from heads.target import Target
from infer.drafters.early_layers import EarlyLayersDrafter
from infer.drafters.layer_search import Found, search
from infer.lookahead import CostTable
from tests.infer.drafters.common import PROMPT, decode, target_of
from tests.tiny import tiny_model

# a pass costs 1 whatever its rows, a drafted token a tenth for each layer
COSTS = {k: CostTable({1: 1.0, 8: 1.0}, {(1, 1): 0.1 * k, (4, 1): 0.4 * k}, 10) for k in (1, 3)}
PROMPTS = [PROMPT, PROMPT[:, :4]]


def with_idle(*layers: int) -> Target:
    """A target some of whose layers add nothing."""
    model: Any = tiny_model("llama", layers=6)
    for at in layers:
        torch.nn.init.zeros_(model.model.layers[at].self_attn.o_proj.weight)
        torch.nn.init.zeros_(model.model.layers[at].mlp.down_proj.weight)
    return Target(model)


def test_idle_layers_are_left_out() -> None:
    found = search(with_idle(1, 3, 4), PROMPTS, new_tokens=12, costs=COSTS)
    best = found[0]
    assert (best.layers, best.acceptance, best.spec) == ((0, 2, 5), 1.0, "layers:0,2,5")
    assert best.cost == pytest.approx(0.3) and best.lookahead == 8
    assert best.speedup == pytest.approx(9 / (1 + 8 * 0.3))
    assert found == sorted(found, key=lambda one: -one.speedup)
    assert len({one.layers for one in found}) == len(found)
    assert {(0,), (0, 1, 2, 3, 4)} <= {one.layers for one in found}


def test_acceptance_is_what_the_drafter_reaches() -> None:
    """On the same text, with drafts of one token."""
    target = target_of("llama")
    by_layers = {one.layers: one for one in search(target, [PROMPT], new_tokens=40, costs=COSTS)}
    for layers in [(0, 1), (0, 2, 3)]:
        stats = decode(target, EarlyLayersDrafter(target, layers), Budget.chain(1), 40).stats
        judged = stats.log[:-1] if stats.log[-1].proposed == 0 else stats.log
        drafted = sum(r.accepted for r in judged) / len(judged)
        # each accepted token is followed by one that was not drafted, so that not all of the 40 were asked for
        assert drafted == pytest.approx(by_layers[layers].acceptance, abs=0.25)


def test_the_budget_limits_what_is_tried() -> None:
    assert len(search(target_of("llama"), PROMPTS, 3, new_tokens=4, costs=COSTS)) == 3


def test_costs_are_measured_unless_given() -> None:
    found = search(target_of("llama"), [PROMPT], 2, new_tokens=4)
    assert all(isinstance(one, Found) and one.speedup > 0 for one in found)


def test_what_cannot_be_searched() -> None:
    with pytest.raises(ValueError, match="needs prompts"):
        search(target_of("llama"), [])
    with pytest.raises(ValueError, match="single layer"):
        search(Target(tiny_model("llama", layers=1)), PROMPTS)
