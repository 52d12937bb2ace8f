"""The bench: fields, pairing, the baseline's choice, loops left out, equality of tokens. Speeds themselves by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from heads.grow import Budget
from heads.target import Target
from infer import bench as module
from infer import timing
from infer.bench import GENERATE, HEADS, LOOP, bench, choose_budget, table
from infer.costs import measure_costs
from infer.drafters import NoDrafter
from infer.evaluate import Question
from infer.lookahead import PLAIN
from infer.timing import Clock, Run
from tests.infer.oracles import Oracle, greedy_text
from tests.tiny import tiny_model

IDS = torch.tensor([[3, 9, 27, 17]])
QUESTIONS = [Question(str(n), "a", IDS) for n in range(3)]
WARM = [Question("warm", "a", IDS)]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", max_position_embeddings=4096))


@pytest.fixture(scope="module")
def oracle(target: Target) -> Oracle:
    return Oracle(greedy_text(target, IDS, 100), lookahead=3)


def test_the_report_has_what_a_fair_comparison_needs(target: Target, oracle: Oracle) -> None:
    report = bench(target, oracle, QUESTIONS, WARM, max_new_tokens=21, budget=Budget.chain(3))
    assert set(report["arms"]) == {GENERATE, LOOP, HEADS}
    for arm in report["arms"].values():
        assert arm["tokens"] == 3 * 20
        assert arm["tokens_per_second"] > 0 and arm["ttft_seconds"]["p50"] > 0
        assert arm["inter_token_seconds"]["p95"] >= arm["inter_token_seconds"]["p50"] > 0
    assert report["tokens_per_round"]["value"] == 4.0
    assert report["equality"]["identical"] and report["equality"]["explained"]
    assert report["baseline"] in (GENERATE, LOOP)
    assert report["settings"]["warmup_prompts"] == ["warm"]
    assert 0 < report["forward_share"] <= 1
    json.dumps(report)
    text = table(report)
    assert "model.generate" in text and "speed-up" in text and "TTFT" in text and "3 deep (given)" in text


def test_the_budget_is_chosen_on_the_warm_up_prompts(target: Target, oracle: Oracle) -> None:
    report = bench(target, oracle, QUESTIONS[:1], WARM, max_new_tokens=12)
    names = [way["name"] for way in report["lookahead"]["candidates"]]
    assert {"plain", "chain 1", "chain 3"} <= set(names)
    assert any("static" in name for name in names) and any("dynamic" in name for name in names)
    assert report["lookahead"]["costs"]["settings"]["dtype"] == "float64"
    speeds = [way["speed"] for way in report["lookahead"]["candidates"]]
    assert speeds[0] == max(speeds)


def test_a_perfect_free_drafter_is_used_and_a_dear_one_or_none_is_not(
    monkeypatch: pytest.MonkeyPatch, target: Target, oracle: Oracle
) -> None:
    costs = measure_costs(target, oracle, IDS)  # the tiny target's own costs are mostly the clock's noise
    free = replace(costs, rows=dict.fromkeys(costs.rows, 1.0), drafts=dict.fromkeys(costs.drafts, 0.0), overhead=0.0)
    dear = replace(free, drafts=dict.fromkeys(costs.drafts, 10.0))
    for table_of_costs, drafts in ((free, True), (dear, False)):
        monkeypatch.setattr(module, "measure_costs", lambda *_, table=table_of_costs: table)
        assert (choose_budget(target, oracle, WARM, 24).budget.depth > 0) == drafts
    assert choose_budget(target, NoDrafter(), WARM).budget == PLAIN


def test_timed_and_warm_up_prompts_are_kept_apart(target: Target, oracle: Oracle) -> None:
    with pytest.raises(ValueError, match="both timed and used"):
        bench(target, oracle, WARM, WARM)
    with pytest.raises(ValueError, match="other prompts to warm up"):
        bench(target, oracle, QUESTIONS, [])


def test_arms_take_turns(monkeypatch: pytest.MonkeyPatch, target: Target, oracle: Oracle) -> None:
    order: list[str] = []
    bare, loop = module.bare, module.loop

    def watch_bare(*args: object) -> Run:
        order.append("g")
        return bare(*args)  # type: ignore[arg-type]

    def watch_loop(target: Target, drafter: object, *args: object) -> Run:
        order.append("n" if isinstance(drafter, NoDrafter) else "h")
        return loop(target, drafter, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "bare", watch_bare)
    monkeypatch.setattr(module, "loop", watch_loop)
    bench(target, oracle, QUESTIONS, WARM, max_new_tokens=4, budget=Budget.chain(2))
    assert "".join(order) == "gnh" + "gnh" + "nhg" + "hgn"  # warm-up first


def test_a_wrong_decoder_shows(monkeypatch: pytest.MonkeyPatch, target: Target, oracle: Oracle) -> None:
    loop = module.loop

    def spoiled(*args: object) -> Run:
        run = loop(*args)  # type: ignore[arg-type]
        run.tokens = [*run.tokens[:5], (run.tokens[5] + 1) % 64, *run.tokens[6:]]
        return run

    monkeypatch.setattr(module, "loop", spoiled)
    report = bench(target, oracle, QUESTIONS[:1], WARM, max_new_tokens=12, budget=Budget.chain(2))
    assert not report["equality"]["identical"] and not report["equality"]["explained"]
    assert report["equality"]["differences"][0]["position"] == 5
    assert "NOT ALL NEAR-TIES" in table(report)


def run(tokens: list[int], groups: list[int], waits: list[float]) -> Run:
    return Run(tokens, groups, 0.5, waits)


def test_speeds_by_hand() -> None:
    theirs = [run([1, 2, 3, 4, 5], [1] * 5, [1.0] * 4), run([1, 2, 3], [1] * 3, [2.0] * 2)]
    ours = [run([1, 2, 3, 4, 5], [1, 2, 2], [1.0, 1.0]), run([1, 2, 3], [1, 2], [1.0])]
    assert timing.speed(theirs) == pytest.approx(6 / 8)
    assert timing.pooled_ratio(theirs, ours, False) == pytest.approx((6 / 3) / (6 / 8))
    assert timing.median_ratio(theirs, ours, False) == pytest.approx((2 + 4) / 2)
    arm = module._arm(ours)
    assert arm["inter_token_seconds"]["p50"] == 0.5 and arm["wait_seconds"]["p50"] == 1.0


def test_looped_tokens_are_left_out_of_the_loop_free_speed() -> None:
    """Eight tokens, then the same eight again: the second half is a loop."""
    tokens = [*range(8), *range(8)]
    slow_then_fast = run(tokens, [1] * 16, [1.0] * 7 + [0.1] * 8)
    assert slow_then_fast.work() == pytest.approx((15, 7.8))
    assert slow_then_fast.work(without_loops=True) == pytest.approx((7, 7.0))


def test_the_clock_groups_what_arrives_together() -> None:
    clock = Clock()
    clock.put(torch.tensor([[1, 2]]))
    for token in (5, 6, 7):
        clock.put(torch.tensor([token]))
    clock.end()
    result = Run.of(clock, [5, 6, 7], [1, 2])
    assert len(result.waits) == 1 and result.ttft >= 0
    assert result.waits[0] == clock.arrivals[2] - clock.arrivals[0]
