"""Chains that end by the drafter's own word: where they end by hand, what it gains, words that are wrong, exactness."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import infer
from heads.draft import Draft
from heads.grow import Budget
from heads.target import Target
from infer.control import AdaptiveControl
from infer.lookahead import CostTable
from infer.metrics import Round
from infer.trust import WHOLE, Word
from tests.heads.small import small_heads
from tests.tiny import tiny_model

STEEP = CostTable(rows={1: 1.0, 2: 1.15, 8: 2.05}, drafts={(1, 1): 0.1, (5, 1): 0.1}, context=1)
Tells = Callable[[float], float]  # a token's chance -> what the drafter says it is


def chain(told: tuple[float, ...]) -> Draft:
    return replace(Draft.chain(range(len(told))), trust=told)


# floors, by hand


def test_a_floor_is_what_one_more_row_costs_in_tokens() -> None:
    prices = CostTable(rows={1: 1.0, 2: 1.2, 3: 1.3}, drafts={(1, 1): 0.1, (2, 1): 0.3}, context=1)
    assert Word().floors(prices, 2, 2.0) == pytest.approx((0.4, 0.6))  # 2 · 0.2; 2 · (0.1 + 0.2)
    assert Word().floors(prices, 0, 2.0) == ()
    falling = CostTable(rows={1: 1.0, 2: 0.9}, drafts={}, context=1)
    assert Word().floors(falling, 1, 2.0) == (0.0,), "a pass that is timed as cheaper costs nothing more"


def test_a_batch_pays_for_a_row_of_all_its_texts() -> None:
    prices = CostTable(
        rows={1: 1.0, 2: 1.2}, drafts={(1, 1): 0.1, (2, 1): 0.2}, context=1, batches={4: {1: 2.0, 2: 2.4, 3: 3.0}}
    )
    # a text buys 0.5 tokens a second: 0.5 · 0.4; 0.5 · (0.6 + 4 · 0.1)
    assert Word().floors(prices, 2, 0.5, batch=4) == pytest.approx((0.2, 0.5))


def test_a_word_is_calibrated_by_depth_and_by_what_was_reached() -> None:
    assert not Word().given
    word = Word()
    for _ in range(400):
        word.observe(chain((0.5, 0.9, 0.3)), [0])  # the first holds, the second does not, the third is not reached
    assert word.given
    assert word.factor(0) == pytest.approx((50 + 1) / (25 + 1), rel=1e-3)  # 50 rounds count, at 0.98
    assert word.factor(1) == pytest.approx(1.8 / (45 + 1.8), rel=1e-3)
    assert word.factor(2) == word.factor(9) == 1.0
    floors = word.floors(STEEP, 3, 1.0)
    assert floors[1] == pytest.approx(0.15 / (word.factor(0) * word.factor(1)))
    before = word.factor(0)
    word.observe(Draft.chain([1, 2]), [0])  # no word
    word.observe(Draft((1, 2), (-1, -1), (None, None)), [0])  # no chain
    word.observe(chain((float("nan"),)), [])  # no number
    assert word.factor(0) == before


# what it gains


def told_rounds(control: AdaptiveControl, tells: Tells | None, rounds: int = 1500, seed: int = 0) -> float:
    """Tokens a second where half of the rounds are easy (0.9 a token) and half are hard (0.1)."""
    draw = random.Random(seed)
    tokens = seconds = 0.0
    for at in range(rounds):
        budget = control.budget(1)
        easy = 0.9 if draw.random() < 0.5 else 0.1
        holds = [draw.random() < easy for _ in range(5)]
        draft = Draft.chain(range(budget.depth))
        if tells is not None:
            told: list[float] = []
            whole = 1.0
            for depth in range(budget.depth):
                whole *= tells(easy)
                if whole < budget.floor(depth):
                    break
                told.append(tells(easy))
            draft = chain(tuple(told))
        path: list[int] = []
        while len(path) < len(draft) and holds[len(path)]:
            path.append(len(path))
        cost = STEEP.target(1 + len(draft)) + STEEP.draft(budget.depth, 1)
        control.observe(draft, path, Round(len(draft), budget.depth, len(path), 1 + len(path)))
        if at >= 300:
            tokens, seconds = tokens + 1 + len(path), seconds + cost
    return tokens / seconds


def test_a_word_that_is_true_gains_what_it_should() -> None:
    # five tokens in easy rounds and none in hard ones: (4.69 + 1) / (1.7 + 1.1), less what is drafted whole at times
    without = told_rounds(AdaptiveControl(STEEP, 5), None)
    with_word = told_rounds(AdaptiveControl(STEEP, 5), lambda chance: chance)
    assert without == pytest.approx(1.53, abs=0.02)
    assert with_word == pytest.approx(1.95, abs=0.02)


WRONG: dict[str, Tells] = {
    "much too high": lambda chance: chance**0.25,
    "too low": lambda chance: chance / 3,
    "far too low": lambda chance: chance / 50,
}


@pytest.mark.parametrize("case", WRONG)
def test_a_word_that_is_wrong_is_put_right(case: str) -> None:
    true = told_rounds(AdaptiveControl(STEEP, 5), lambda chance: chance)
    assert told_rounds(AdaptiveControl(STEEP, 5), WRONG[case]) > 0.9 * true


def test_a_word_that_says_nothing_loses_little() -> None:
    without = told_rounds(AdaptiveControl(STEEP, 5), None)
    assert told_rounds(AdaptiveControl(STEEP, 5), lambda chance: 0.7) > 0.93 * without


def test_without_calibration_a_wrong_word_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Word, "factor", lambda self, depth: 1.0)
    true = told_rounds(AdaptiveControl(STEEP, 5), lambda chance: chance)
    assert told_rounds(AdaptiveControl(STEEP, 5), WRONG["too low"]) < 0.9 * true


def test_without_whole_chains_a_low_word_would_silence_the_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Word, "whole", lambda self: False)
    true = told_rounds(AdaptiveControl(STEEP, 5), lambda chance: chance)
    assert told_rounds(AdaptiveControl(STEEP, 5), WRONG["far too low"]) < 0.9 * true


def test_floors_of_another_depth_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """As would prices without what they buy: chains that never end, or always."""
    true = told_rounds(AdaptiveControl(STEEP, 5), lambda chance: chance)
    for floor in (0.0, 0.95):
        monkeypatch.setattr(Word, "floors", lambda self, prices, depth, speed, batch=1, floor=floor: (floor,) * depth)
        assert told_rounds(AdaptiveControl(STEEP, 5), lambda chance: chance) < 0.9 * true


def test_floors_come_with_a_word_and_with_chains_alone() -> None:
    watched = AdaptiveControl(STEEP, 5)
    asked = []
    for _ in range(60):
        budget = watched.budget(1)
        asked.append(budget)
        draft = chain((0.9,) * budget.depth)
        watched.observe(draft, list(range(len(draft))), Round(len(draft), len(draft), len(draft), 1 + len(draft)))
    drafted = [budget for budget in asked if budget.depth]
    assert not drafted[0].floors and sum(not budget.floors for budget in drafted[1:]) == len(drafted[1:]) // WHOLE
    assert all(len(budget.floors) in (0, budget.depth) for budget in drafted)
    silent = AdaptiveControl(STEEP, 5)
    for _ in range(40):
        budget = silent.budget(1)
        assert not budget.floors
        draft = Draft.chain(range(budget.depth))
        silent.observe(draft, list(range(len(draft))), Round(len(draft), len(draft), len(draft), 1 + len(draft)))


def test_budgets_keep_their_floors_when_they_shrink() -> None:
    budget = Budget(6, 5, floors=(0.5, 0.4, 0.3, 0.2, 0.1))
    assert budget.within(2) == Budget(3, 2, floors=budget.floors) and budget.fit(4).floors == budget.floors
    assert [budget.floor(depth) for depth in (0, 4, 5)] == [0.5, 0.1, 0.0] and Budget.chain(3).floor(0) == 0.0


# with real heads


@pytest.mark.parametrize("drawn", [False, True])
def test_the_text_is_the_targets_and_drafts_end_early(drawn: bool) -> None:
    model = tiny_model("llama")
    made = small_heads("block", Target(model), lookahead=4, confidence=True)
    ids = torch.tensor([[7, 3, 44, 12]])
    free = CostTable(rows={1: 1.0, 2: 1.001, 8: 1.004}, drafts={(1, 1): 0.0, (4, 1): 0.0}, context=1)

    class Told(AdaptiveControl):
        """Drafts four tokens whatever came of it, but ends them where the word says so."""

        asked: list[Budget]

        def budget(self, batch: int = 1, match: int = 0) -> Budget:
            floors = self.word.floors(free, 4, 100.0, batch) if self.word.given else ()
            self.asked = [*getattr(self, "asked", []), Budget(5, 4, floors=floors)]
            return self.asked[-1]

        def observe(self, draft: Draft, path: object, done: Round) -> None:
            self.word.observe(draft, path)  # type: ignore[arg-type]

    control = Told(free, 4)
    settings = {"do_sample": True, "top_k": 0, "seed": 3} if drawn else {"do_sample": False}
    out = infer.generate(model, ids, made, control=control, max_new_tokens=60, **settings)
    if not drawn:
        assert torch.equal(out.sequences, model.generate(ids, max_new_tokens=60, do_sample=False))
    lengths = {r.proposed for r in out.stats.log[:-4]}
    assert control.word.given and len(lengths) > 1 and min(lengths) < 4
    again = infer.generate(model, ids, made, control=Told(free, 4), max_new_tokens=60, **settings)
    assert torch.equal(out.sequences, again.sequences)
