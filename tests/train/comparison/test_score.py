"""Figures of one contestant: every budget, whether its drafts can be walked or must all be decoded."""

from __future__ import annotations

import pytest
import torch

from infer.evaluate import Question, Settings
from infer.walk import walk
from tests.heads.small import random_ids, small_heads, small_target
from train.compare.price import ceilings, price
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
    assert (budgets["chain 7"].rows, budgets["chain 7"].width) == (8, 1), "rows that masks of mtp heads may take"


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
@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_other_budgets_may_be_the_ones_that_count(kind: str) -> None:
    target = small_target(layers=4)
    plan = Plan(Settings(8), (0.0, 1.0), decoded=("chain 1", "chain 3", "tree 8"))
    found = score(
        target, of_heads(small_heads(kind, target, lookahead=2), 5), [Question("one", "all", random_ids(6))], plan, kind
    )
    assert list(found.decoded) == [f"{budget} T={heat}" for heat in (0, 1) for budget in plan.decoded]
    assert columns((1.0,), plan.decoded) == ["chain 1, T=1", "chain 3, T=1", "tree 8, T=1"]
    assert found.of("tree 8, T=1") == found.decoded["tree 8 T=1"]
    for walked, decoded in agreement(found).values():
        assert walked == decoded


@torch.no_grad()
@pytest.mark.parametrize(("kind", "passes"), [("medusa", 1), ("hydra", 3), ("eagle", 3), ("block", 1), ("mtp", 0)])
def test_what_heads_cost_beside_the_target(kind: str, passes: int) -> None:
    target = small_target(layers=4)
    heads = small_heads(kind, target, lookahead=3)
    found = price(target, heads, 3, random_ids(6), ("chain 1", "chain 7", "tree 8"))
    stored = [value for value in heads.state_dict().values() if value.is_floating_point()]
    assert (found["parameters"], found["passes"]) == (sum(value.numel() for value in stored), passes)
    for name in ("chain 1", "chain 7", "tree 8"):
        assert found["draft"][name] > 0 and found["pass"][name] >= 1, "a pass over more rows is never the cheaper one"
        assert found["round"][name] == pytest.approx(found["draft"][name] + found["pass"][name])
    assert ceilings(found, {"tree 8, T=1": 3.0}) == {"tree 8, T=1": 3.0 / found["round"]["tree 8"]}


@torch.no_grad()
def test_without_a_draft_every_round_gives_one_token() -> None:
    target = small_target(layers=4)
    nothing = controls(target, 5, 1)["no draft"]
    found = score(target, nothing, [Question("one", "all", random_ids(6))], Plan(Settings(8), (0.0, 1.0)), "nothing")
    for each in (*found.greedy.values(), *found.decoded.values()):
        assert [one.emitted for one in each[0].log] == [1] * 7
