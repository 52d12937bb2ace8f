"""Measured costs: every size asked for is there, in real rounds, and the refusal names what lacks."""

from __future__ import annotations

import time

import pytest
import torch

from heads.draft import Draft
from heads.grow import Budget, Sampler
from heads.target import Target
from infer.costs import measure_costs
from infer.drafters import NoDrafter
from infer.lookahead import Acceptance, candidates
from tests.infer.oracles import Oracle, greedy_text
from tests.tiny import tiny_model

IDS = torch.tensor([[3, 9, 27, 17]])


class Slow(Oracle):
    """A millisecond a step."""

    def propose(self, budget: Budget, sampler: Sampler | None) -> Draft:
        time.sleep(0.001 * budget.depth)
        return super().propose(budget, sampler)


def test_all_sizes_are_timed_and_feed_the_choice() -> None:
    target = Target(tiny_model("llama"))
    drafter = Slow(greedy_text(target, IDS, 200), lookahead=4)
    costs = measure_costs(target, drafter, IDS, rows=(1, 2, 5), repeats=3)
    assert sorted(costs.rows) == [1, 2, 5]
    assert sorted(costs.drafts) == [(d, w) for d in (1, 2, 4) for w in (1, 8)]
    assert all(seconds > 0 for seconds in costs.rows.values())
    assert 0.001 <= costs.draft(1, 1) < costs.draft(4, 1)
    assert costs.settings["dtype"] == "float64"
    assert candidates(costs, Acceptance(joint=(1.0,) * 4))


def test_no_draft_has_no_draft_costs() -> None:
    costs = measure_costs(Target(tiny_model("llama")), NoDrafter(), IDS, rows=(1, 4), repeats=2)
    assert costs.drafts == {}
    assert costs.draft(0, 1) == 0.0


def test_too_few_positions_are_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="positions"):
        measure_costs(Target(tiny_model("llama")), NoDrafter(), IDS, rows=(1, 64), repeats=50)
