"""Control of heads that draft inside the pass: what it chooses, what it may cost, and the target's own text."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import infer
from heads.draft import Draft
from heads.grow import Budget
from heads.target import Target
from infer import controls
from infer.control import SLACK, TRIAL
from infer.costs import measure_costs
from infer.drafters import FirstToSpeak, HeadsDrafter, LookupDrafter
from infer.drafters import make as make_drafter
from infer.lookahead import CostTable
from infer.metrics import Round
from infer.riding import RidingControl
from tests.heads.inside import small_mtp
from tests.heads.small import small_heads
from tests.infer.test_mtp import PROMPT, greedy, riding, target_of
from tests.tiny import tiny_model

USUAL = [Budget(rows=(depth + 1) ** 2, depth=depth) for depth in (1, 2, 3)]
TABLE = CostTable(rows={1: 1.0, 4: 1.05, 9: 1.15, 16: 1.3}, drafts={(1, 1): 0.01, (3, 1): 0.02}, context=1)


class Passes:
    """Rounds whose drafts are as deep as the round before had masks for."""

    def __init__(self, control: RidingControl, table: CostTable) -> None:
        self.control, self.table = control, table
        self.asked: list[Budget] = []
        self.seconds = self.tokens = 0.0
        self.draw = random.Random(0)

    def run(self, rounds: int, odds: float) -> Passes:
        for _ in range(rounds):
            budget = self.control.budget(1)
            laid = self.asked[-1].depth if self.asked else 0
            draft = Draft.chain(range(min(budget.depth, laid)))
            path: list[int] = []
            while len(path) < len(draft) and self.draw.random() < odds:
                path.append(len(path))
            self.asked.append(budget)
            self.seconds += self.table.round(budget)
            self.tokens += 1 + len(path)
            done = Round(len(draft), len(draft), len(path), 1 + len(path), rows=budget.rows)
            self.control.observe(draft, path, done)
        return self


def test_masks_that_are_used_are_laid_as_deep_as_pays() -> None:
    run = Passes(RidingControl(TABLE, USUAL), TABLE).run(120, 0.9)
    assert {budget.depth for budget in run.asked[20:]} == {3}
    assert run.tokens / run.seconds > 2.4  # 1 + .9 + .81 + .73 tokens for 1.32 of a plain pass


def test_one_mask_where_the_second_hardly_ever_holds() -> None:
    steep = CostTable(rows={1: 1.0, 4: 1.1, 9: 2.0, 16: 3.0}, drafts={}, context=1)
    run = Passes(RidingControl(steep, USUAL), steep).run(200, 0.5)
    assert {budget.depth for budget in run.asked[60:]} == {1}


@settings(max_examples=30, deadline=None)
@given(odds=st.floats(0, 1), one=st.floats(1.0, 1.5), more=st.floats(0, 2))
def test_what_may_be_lost_is_bounded(odds: float, one: float, more: float) -> None:
    table = CostTable(rows={1: 1.0, 4: one, 9: one + more, 16: one + 2 * more}, drafts={}, context=1)
    run = Passes(RidingControl(table, USUAL), table).run(300, odds)
    assert run.seconds <= (1 + SLACK) * run.tokens + TRIAL + 1e-9


def test_masks_that_are_never_used_are_tried_now_and_then() -> None:
    run = Passes(RidingControl(TABLE, USUAL), TABLE).run(400, 0.0)
    late = [budget.depth > 0 for budget in run.asked[100:]]
    assert 0 < sum(late) < 20
    assert run.seconds < 1.03 * run.tokens + TRIAL


def test_a_draft_is_held_against_the_masks_there_were() -> None:
    """A first draft after plain rounds is empty, and one after a shallower budget is short: that is no silence."""
    control = RidingControl(TABLE, USUAL)
    control.budget(1)
    control.observe(Draft.empty(), [], Round(0, 0, 0, 1, rows=16))
    assert not control.tracker.voices
    control.budget(1)
    control.observe(Draft.chain(range(3)), [0, 1, 2], Round(3, 3, 3, 4, rows=16))
    assert [voice.silent for voice in control.tracker.voices.values()] == [False]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("seed", [None, 5])
def test_the_text_is_the_targets(family: str, seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controls, "stored_costs", lambda *_: TABLE)
    made = small_mtp(target_of(family))
    text = greedy(made.target.model)
    drafts = riding(made, text, 3)
    out = infer.generate(
        made.target.model, PROMPT, drafts, control="auto", seed=seed, max_new_tokens=20, do_sample=False
    )
    assert torch.equal(out.sequences, text)
    laid = any(r.rows > 1 + r.proposed for r in out.stats.log)
    assert laid or seed is None, "by the table masks pay; the clock may say what it likes"


def test_which_budgets_are_chosen_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controls, "stored_costs", lambda *_: TABLE)
    heads = HeadsDrafter(small_mtp(target_of("llama")))

    def made(drafter: Any, budget: Budget | None = None) -> list[int]:
        control = controls.make(heads.heads.target, drafter, PROMPT, seed=1, budget=budget)
        assert isinstance(control, RidingControl)
        return [chain.rows for chain in control.chains]

    assert made(heads) == [4, 9, 16]
    assert made(FirstToSpeak([LookupDrafter(lookahead=2), heads])) == [4, 9, 16]
    assert made(heads, Budget(rows=12, depth=3)) == [4, 9]
    assert made(heads, Budget(rows=3, depth=2)) == [3]


def test_costs_are_of_the_passes_that_its_masks_ride_in() -> None:
    heads = HeadsDrafter(small_mtp(target_of("llama")))
    costs = measure_costs(heads.heads.target, heads, PROMPT, rows=(1, 2), repeats=1)
    assert sorted(costs.rows) == [1, 2, 4, 16] and sorted(costs.drafts) == [(1, 1), (3, 1)]


def test_texts_decoded_together_are_each_held_against_the_masks_of_the_round_before() -> None:
    control = RidingControl(TABLE, USUAL)
    for laid in (0, 1):
        asked = [control.budget(3) for _ in range(3)]
        for budget in asked:
            assert budget.depth
            draft = Draft.chain(range(min(budget.depth, laid)))
            control.observe(draft, list(range(len(draft))), Round(len(draft), laid, len(draft), 1 + len(draft)))
    assert [voice.silent for voice in control.tracker.voices.values()] == [False]


def test_a_target_that_reads_chains_only_is_drafted_for_with_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """ALiBi: a tree's rows would be at wrong places, and the target refuses them."""
    monkeypatch.setattr(controls, "stored_costs", lambda *_: TABLE)
    target = Target(tiny_model("falcon", alibi=True), name="tiny/falcon")
    made, text = small_heads("eagle", target, taps=(1, 2, 3)), greedy(target.model)
    for spec in ("heads", "lookup|heads"):
        drafts = make_drafter(spec, made, target)
        out = infer.generate(target.model, PROMPT, drafts, control="auto", seed=1, max_new_tokens=20, do_sample=False)
        assert torch.equal(out.sequences, text) and any(r.proposed for r in out.stats.log)
