"""Figures of one contestant: every budget, whether its drafts can be walked or must all be decoded."""

from __future__ import annotations

import pytest
import torch

from infer.evaluate import Question, Settings
from infer.walk import walk
from tests.heads.small import random_ids, small_heads, small_target
from train.compare.score import CHAINS, TREES, Plan, agreement, columns, controls, every_budget, of_heads, score


@pytest.mark.parametrize("kind", ["medusa", "mtp"])
@torch.no_grad()
def test_every_budget_has_a_figure_for_every_prompt(kind: str) -> None:
    target = small_target(layers=4)
    contestant = of_heads(small_heads(kind, target, lookahead=2), 5)
    asked = [Question(str(seed), "all", random_ids(6, seed=seed)) for seed in (1, 2)]
    found = score(target, contestant, asked, Plan(Settings(8), (0.0, 1.0)), kind)
    assert list(found.greedy) == [f"chain {depth}" for depth in CHAINS] + [f"tree {rows}" for rows in TREES]
    assert list(found.decoded) == ["chain 7 T=0", "tree 32 T=0", "chain 7 T=1", "tree 32 T=1"]
    for stats in (*found.greedy.values(), *found.decoded.values()):
        assert len(stats) == 2 and all(one.tokens == 8 for one in stats)
    for walked, decoded in agreement(found).values():
        assert walked == decoded


def test_heads_are_asked_no_deeper_than_they_can() -> None:
    target = small_target(layers=4)
    assert of_heads(small_heads("medusa", target, lookahead=2), 5).deepest == 2
    assert of_heads(small_heads("eagle", target, lookahead=2), 5).deepest == 5, "it drafts on its own outputs"
    budgets = every_budget(2)
    assert (budgets["chain 1"].depth, budgets["chain 7"].depth, budgets["tree 32"].depth) == (1, 2, 2)
    assert budgets["tree 32"].rows == 32


def test_what_is_drafted_inside_a_pass_cannot_be_walked() -> None:
    target = small_target(layers=4)
    contestant = of_heads(small_heads("mtp", target, lookahead=2), 2)
    with pytest.raises(ValueError, match="a walk along a text is not supported with heads that draft inside"):
        tree = every_budget(2)["tree 8"]
        walk(target, contestant.drafter, Question("one", "all", random_ids(6)), Settings(8), chain=2, tree=tree)


@torch.no_grad()
def test_only_checked_prompts_are_really_decoded_greedily() -> None:
    target = small_target(layers=4)
    asked = [Question(str(seed), "all", random_ids(6, seed=seed)) for seed in (1, 2)]
    plan = Plan(Settings(8), (0.0, 1.0), checked=1)
    found = score(target, of_heads(small_heads("medusa", target, lookahead=2), 5), asked, plan, "some")
    assert {name: len(each) for name, each in found.decoded.items()} == {
        "chain 7 T=0": 1, "tree 32 T=0": 1, "chain 7 T=1": 2, "tree 32 T=1": 2,
    }  # fmt: skip
    assert [len(found.of(column)) for column in columns(plan.temperatures)] == [2, 2, 2, 2]
    assert found.of("chain 7, T=1") == found.decoded["chain 7 T=1"] != found.of("chain 7, T=0")


@torch.no_grad()
def test_without_a_draft_every_round_gives_one_token() -> None:
    target = small_target(layers=4)
    nothing = controls(target, 5, 1)["no draft"]
    found = score(target, nothing, [Question("one", "all", random_ids(6))], Plan(Settings(8), (0.0, 1.0)), "nothing")
    for each in (*found.greedy.values(), *found.decoded.values()):
        assert [one.emitted for one in each[0].log] == [1] * 7
