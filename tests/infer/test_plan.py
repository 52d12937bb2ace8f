"""The plan: speed-ups by the formula, break-even, the sentence, the picture; costs by hand, no clock."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from heads.grow import Budget
from heads.target import Target
from infer import plan, plot
from infer.drafters import NoDrafter
from infer.lookahead import Acceptance, CostTable
from tests.tiny import tiny_model

# a row more costs a twentieth of a pass over one text; sixteen texts fill the machine
COSTS = CostTable(
    rows={n: 1 + 0.05 * (n - 1) for n in (1, 2, 4, 8)},
    drafts={(1, 1): 0.1, (4, 1): 0.4, (1, 8): 0.1, (4, 8): 0.4},
    context=64,
    settings={"dtype": "bfloat16", "device": "cpu", "threads": 2},
    batches={4: {n: 1.2 + 0.2 * (n - 1) for n in (1, 2, 4, 8)}, 16: {n: 2.0 * n for n in (1, 2, 4, 8)}},
)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", max_position_embeddings=4096))


def test_the_formula() -> None:
    """E[tokens] · t_B(1) / (d_B + t_B(N)), by hand."""
    one = plan.speedups(COSTS, (0.6, 0.36), 1)
    assert one == pytest.approx([1.0, 1.6 / (0.1 + 1.05), 1.96 / (0.2 + 1.1)])
    four = plan.speedups(COSTS, (0.6,), 4)
    assert four == pytest.approx([1.0, 1.6 * 1.2 / (4 * 0.1 + 1.4)])


def test_rows_that_a_chain_takes_beside_its_tokens_are_paid() -> None:
    """Three rows for a token and its masks, as heads that draft inside the pass take them."""
    one = plan.speedups(COSTS, (0.6,), 1, lambda depth: Budget(rows=1 + 3 * depth, depth=depth))
    assert one == pytest.approx([1.0, 1.6 / (0.1 + 1.15)])
    even = plan.break_even(COSTS, 1, 1, lambda depth: Budget(rows=1 + 3 * depth, depth=depth))
    assert even == pytest.approx(0.251)


def test_break_even_is_where_a_chain_begins_to_pay() -> None:
    assert plan.break_even(COSTS, 4, 1) == pytest.approx(0.151)  # 1 + α > 0.1 + 1.05
    assert plan.break_even(COSTS, 4, 4) == pytest.approx(0.5, abs=0.002)  # 1.2 (1 + α) > 0.4 + 1.4
    assert plan.break_even(COSTS, 4, 16) is None


def test_the_report_and_its_sentence(target: Target) -> None:
    report = plan.plan(target, COSTS, [16, 1, 4], 4, assumed=(0.6, 0.1))
    assert list(report["curve"]) == ["1", "4", "16"]
    assert report["curve"]["16"]["8"] == pytest.approx(8.0)
    best = report["best"]["0.6"]
    assert best["1"]["name"] == "chain 2" and best["16"]["name"] == "plain" and best["16"]["speedup"] == 1.0
    assert best["1"]["speedup"] == pytest.approx(max(plan.speedups(COSTS, plan.geometric(0.6, 4).joint, 1)))
    assert report["advice"].startswith("Train heads: with 60% of drafted tokens accepted, one text should decode 1.5")
    assert "below 15% drafting would not pay" in report["advice"]
    assert "From 16 texts at once on, plain decoding is as fast" in report["advice"]
    json.dumps(report)
    text = plan.table(report)
    assert "break-even acceptance" in text and "never" in text and report["advice"] in text


@pytest.mark.parametrize(
    ("acceptance", "batches", "said"),
    [
        (0.17, [1], "Heads would hardly pay"),
        (0.9, [16], "Do not draft for 16 texts at once on this machine: even drafts that are always right"),
    ],
)
def test_it_says_when_not_to(target: Target, acceptance: float, batches: list[int], said: str) -> None:
    assert plan.plan(target, COSTS, batches, 4, assumed=(acceptance,))["advice"].startswith(said)


def test_measured_acceptance_comes_first_and_may_choose_a_tree(target: Target) -> None:
    measured = Acceptance(joint=(0.3, 0.1), ranks=((0.3, 0.25, 0.2), (0.3, 0.2, 0.1)))
    cheap = CostTable(rows={1: 1.0, 64: 1.1}, drafts=COSTS.drafts, context=64, settings=COSTS.settings)
    report = plan.plan(target, cheap, [1], 2, measured=measured)
    assert next(iter(report["best"])) == "measured"
    assert report["best"]["measured"]["1"]["name"].startswith("static tree")
    assert report["advice"].startswith("Use these heads: with the acceptance measured")
    assert "acceptance measured" in plan.table(report)


def test_costs_of_batches_are_measured(target: Target) -> None:
    ids = torch.tensor([[3, 9, 27, 17]])
    costs = plan.measure(target, NoDrafter(), ids, [1, 3], rows=(1, 2), repeats=1)
    assert sorted(costs.batches) == [3] and sorted(costs.batches[3]) == [1, 2]


def test_without_matplotlib_the_message_says_what_to_install(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[plot\]'` in the clone, or leave --png out"):
        plot.draw(plan.plan(target, COSTS, [1], 4), tmp_path / "plan.png")
    assert list(tmp_path.iterdir()) == []


def test_the_picture_is_a_png(target: Target, tmp_path: Path) -> None:
    plot.draw(plan.plan(target, COSTS, [1, 4, 16], 4), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.png"]
