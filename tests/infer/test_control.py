"""Look-ahead control, simulated without a clock: what it costs at worst, how soon it stops, returns and turns."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heads.draft import Draft
from heads.grow import Budget
from infer.control import LONGEST_WAIT, SLACK, TRIAL, AdaptiveControl
from infer.live import LiveCosts
from infer.lookahead import PLAIN, CostTable
from infer.metrics import Round

FLAT = {1: 0.040, 2: 0.040, 8: 0.042, 16: 0.047, 32: 0.059, 64: 0.091}  # seconds on a machine with room for trees
CHEAP = CostTable(rows=FLAT, drafts={(1, 1): 0.004, (5, 1): 0.02, (1, 8): 0.006, (5, 8): 0.03}, context=100)

Odds = Callable[[int], float]  # place in the text -> P(a drafted token is the target's)


def drafted(budget: Budget, first: int = 0) -> Draft:
    """What a drafter makes of a budget: a chain, or two children at each node of a chain."""
    if budget.depth == 0:
        return Draft.empty()
    if budget.width == 1:
        return Draft.chain(range(first, first + budget.depth))
    tokens, parents, node = [], [], -1
    for depth in range(min(budget.depth, (budget.rows - 1) // 2)):
        tokens += [2 * depth, 2 * depth + 1]
        parents += [node, node]
        node = len(tokens) - 2
    return Draft(tuple(tokens), tuple(parents), (None,) * len(tokens))


def accepted(draft: Draft, chance: float, draw: random.Random) -> list[int]:
    path: list[int] = []
    node = -1
    while (children := draft.children(node)) and draw.random() < chance:
        node = children[0]
        path.append(node)
    return path


class Simulation:
    """Rounds of ``control`` on a machine that costs what ``costs`` says; times are kept by round."""

    def __init__(self, control: AdaptiveControl, costs: CostTable, batch: int = 1, seed: int = 0) -> None:
        self.control, self.costs, self.batch = control, costs, batch
        self.draw = random.Random(seed)
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        self.budgets: list[Budget] = []

    def run(self, rounds: int, odds: Odds, make: Callable[[Budget], Draft] = drafted) -> Simulation:
        for _ in range(rounds):
            budgets = [self.control.budget(self.batch) for _ in range(self.batch)]
            assert len(set(budgets)) == 1
            drafts = [make(budget) for budget in budgets]
            paths = [accepted(draft, odds(sum(self.tokens)), self.draw) for draft in drafts]
            rows = 1 + max(map(len, drafts))
            self.seconds.append(
                self.costs.target(rows, self.batch) + self.batch * self.costs.draft(budgets[0].depth, budgets[0].width)
            )
            self.tokens.append(sum(1 + len(path) for path in paths))
            self.budgets.append(budgets[0])
            for draft, path in zip(drafts, paths, strict=True):
                self.control.observe(draft, path, Round(len(draft), budgets[0].depth, len(path), 1 + len(path)))
        return self

    def over_plain(self, start: int = 0, end: int | None = None) -> float:
        """Seconds of these rounds over those of plain decoding for their tokens."""
        return sum(self.seconds[start:end]) / self.plain(sum(self.tokens[start:end]))

    def plain(self, tokens: float) -> float:
        return tokens * self.costs.round(PLAIN, self.batch) / self.batch

    def share_drafted(self, start: int, end: int | None = None) -> float:
        part = self.budgets[start:end]
        return sum(budget.depth > 0 for budget in part) / len(part)


def control(costs: CostTable = CHEAP, depth: int = 5, trees: Sequence[int] = ()) -> AdaptiveControl:
    return AdaptiveControl(costs, depth, tree_rows=trees)


def never(place: int) -> float:
    return 0.0


@pytest.mark.parametrize("step", [0.001, 0.004, 0.016, 0.06, 0.3])
@pytest.mark.parametrize("trees", [(), (4, 8, 16, 32)])
def test_a_wrong_drafter_costs_five_percent_at_most_after_a_short_trial(step: float, trees: tuple[int, ...]) -> None:
    costs = CostTable(rows=FLAT, drafts={(1, 1): step, (5, 1): 5 * step, (1, 8): step, (5, 8): 5 * step}, context=1)
    run = Simulation(control(costs, trees=trees), costs).run(600, never)
    assert sum(run.seconds[:20]) <= run.plain((1 + SLACK) * 20 + TRIAL)
    for start in (20, 50, 100, 300):
        assert run.over_plain(start) <= 1.05
    assert run.over_plain() <= 1.05


def test_it_costs_less_and_less() -> None:
    run = Simulation(control(), CHEAP).run(1000, never)
    tried = [at for at, budget in enumerate(run.budgets) if budget.depth > 0]
    assert [b - a for a, b in zip(tried[-4:], tried[-3:], strict=False)] == [LONGEST_WAIT + 1] * 3
    assert run.over_plain(500) < 1.005


def test_a_good_drafter_is_used_from_the_start_and_as_deep_as_pays() -> None:
    run = Simulation(control(), CHEAP).run(400, lambda place: 0.8)
    assert run.share_drafted(0) > 0.98
    assert run.over_plain() < 0.52
    best = min(
        (CHEAP.round(Budget.chain(k)) / sum(0.8**i for i in range(k + 1)) for k in range(1, 6)),
    )
    assert sum(run.seconds) / sum(run.tokens) < 1.1 * best


def test_it_stops_when_drafts_turn_bad_and_returns_when_they_are_good_again() -> None:
    """Good for 400 rounds, wrong for 600, good again."""
    run = Simulation(control(), CHEAP).run(400, lambda place: 0.8)
    run.run(600, never)
    assert run.over_plain(400) <= 1.05
    assert sum(run.seconds[400:430]) <= run.plain((1 + SLACK) * 30 + TRIAL)
    assert run.share_drafted(450, 1000) < 0.1
    run.run(300, lambda place: 0.8)
    back = next(at for at in range(1000, 1300) if run.share_drafted(at, at + 20) == 1.0)
    assert back - 1000 <= LONGEST_WAIT + 30
    assert run.over_plain(back) < 0.6


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    times=st.lists(st.floats(0.0, 0.5), min_size=6, max_size=6),
    draft=st.floats(0.0, 2.0),
    odds=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8),
    batch=st.integers(1, 3),
    trees=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_no_stretch_of_text_costs_more_than_the_bound(
    times: list[float], draft: float, odds: list[float], batch: int, trees: bool, seed: int
) -> None:
    """Whatever passes and drafts cost and however acceptance moves: every stretch, not only the whole."""
    rows = {n: 1.0 + sum(times[: at + 1]) for at, n in enumerate((1, 2, 4, 8, 16, 32))}
    costs = CostTable(
        rows=rows, drafts={(1, 1): draft, (4, 1): 2.5 * draft, (1, 8): draft, (4, 8): 3 * draft}, context=1
    )
    run = Simulation(control(costs, 4, (4, 8, 16) if trees else ()), costs, batch, seed)
    for chance in odds:
        run.run(25, lambda place, chance=chance: chance)  # type: ignore[misc]
    worst, above = 0.0, 0.0
    for seconds, tokens in zip(run.seconds, run.tokens, strict=True):
        above = max(0.0, above + seconds - (1 + SLACK) * run.plain(tokens))
        worst = max(worst, above)
    assert worst <= TRIAL * costs.round(PLAIN, batch) + 1e-9


@settings(max_examples=15, deadline=None, derandomize=True)
@given(chance=st.floats(0.0, 1.0), step=st.floats(0.0005, 0.05), seed=st.integers(0, 1000))
def test_steady_text_is_decoded_nearly_as_fast_as_the_best_fixed_depth(chance: float, step: float, seed: int) -> None:
    costs = CostTable(rows=FLAT, drafts={(1, 1): step, (5, 1): 5 * step}, context=1)
    run = Simulation(control(costs), costs, seed=seed).run(400, lambda place: chance)
    fixed = [costs.round(Budget.chain(k)) / sum(chance**i for i in range(k + 1)) for k in range(6)]
    assert sum(run.seconds[50:]) / sum(run.tokens[50:]) <= 1.2 * min(fixed)


def test_a_batch_that_fills_the_machine_is_decoded_plainly() -> None:
    """Rows are free up to 16: four texts gain from drafts, sixteen do not, and drafting is not even tried."""
    rows = {n: 0.04 * max(1.0, n / 16) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)}
    costs = CostTable(rows=rows, drafts={(1, 1): 0.0005, (5, 1): 0.0025}, context=1)
    few = Simulation(control(costs), costs, batch=4).run(100, lambda place: 0.7)
    assert few.share_drafted(20) > 0.95 and few.over_plain(20) < 0.7
    full = Simulation(control(costs), costs, batch=16).run(300, lambda place: 0.7)
    assert full.share_drafted(0) == 0.0 and full.over_plain() == pytest.approx(1.0)
    assert max(budget.depth for budget in few.budgets) >= 2


def test_leaving_rows_bring_drafting_back() -> None:
    rows = {n: 0.04 * max(1.0, n / 16) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)}
    costs = CostTable(rows=rows, drafts={(1, 1): 0.0005, (5, 1): 0.0025}, context=1)
    run = Simulation(control(costs), costs, batch=16).run(50, lambda place: 0.7)
    run.batch = 2
    run.run(60, lambda place: 0.7)
    assert run.share_drafted(50, 60) >= 0.5 and run.share_drafted(70) > 0.95


def two_sources(budget: Budget) -> Draft:
    """A lookup that speaks in every other block of ten calls, else heads."""
    two_sources.calls += 1  # type: ignore[attr-defined]
    source = "lookup" if two_sources.calls // 10 % 2 else "heads"  # type: ignore[attr-defined]
    chain = drafted(budget)
    return Draft(chain.tokens, chain.parents, chain.q, sources=(source,) * len(chain))


def test_acceptance_is_kept_by_source_and_depth() -> None:
    two_sources.calls = 0  # type: ignore[attr-defined]
    watched = control()
    for _ in range(200):
        draft = two_sources(watched.budget(1))
        good = len(draft) and draft.sources[0] == "lookup"
        path = list(range(len(draft))) if good else []
        watched.observe(draft, path, Round(len(draft), len(draft), len(path), 1 + len(path)))
    voices = watched.tracker.voices
    assert set(voices) >= {("lookup",), ("heads",)}
    lookup, heads = (voices[name,].acceptance(False, 2)[0][0] for name in ("lookup", "heads"))
    assert lookup > 0.9 and heads < 0.1


def test_a_drafter_with_nothing_to_say_keeps_being_asked() -> None:
    """Asking is free here; what never spoke is no evidence against what it would say."""
    free = CostTable(rows=FLAT, drafts={(1, 1): 0.0, (5, 1): 0.0}, context=1)
    run = Simulation(control(free), free).run(100, never, lambda budget: Draft.empty())
    assert run.over_plain() == pytest.approx(1.0)
    run.run(40, lambda place: 0.9)
    assert run.share_drafted(105) == 1.0 and run.over_plain(105) < 0.4


def test_trees_are_tried_and_left_when_the_drafter_makes_chains() -> None:
    wide = CostTable(rows={1: 1.0, 64: 1.3}, drafts={(1, 1): 0.05, (5, 1): 0.25, (1, 8): 0.1, (5, 8): 0.5}, context=1)
    tree = Simulation(control(wide, trees=(4, 8, 16)), wide)
    tree.run(300, lambda place: 0.4, lambda budget: drafted(Budget.chain(budget.depth)))
    assert any(budget.width > 1 for budget in tree.budgets)
    assert sum(budget.width > 1 for budget in tree.budgets[100:]) < 40


def test_a_tree_is_kept_where_second_children_are_taken() -> None:
    wide = CostTable(rows={1: 1.0, 64: 1.3}, drafts={(1, 1): 0.3, (5, 1): 1.5, (1, 8): 0.3, (5, 8): 1.5}, context=1)
    watched = control(wide, depth=2, trees=(8,))
    draw, wideness = random.Random(0), []
    for _ in range(300):
        budget = watched.budget(1)
        wideness.append(budget.width > 1)
        if budget.width == 1:
            draft = drafted(budget)
            path = [0] if len(draft) and draw.random() < 0.35 else []
        else:
            draft = Draft(tuple(range(6)), (-1,) * 6, (None,) * 6)
            path = [draw.randrange(3)] if draw.random() < 0.9 else []
        watched.observe(draft, path, Round(len(draft), 1, len(path), 1 + len(path)))
    assert sum(wideness[100:]) > 150


def test_drawn_and_chosen_tokens_are_counted_apart() -> None:
    watched = control()
    q = torch.tensor([0.5, 0.5])
    for _ in range(30):
        asked = watched.budget(1)
        draft = Draft.chain([0] * asked.depth, [q] * asked.depth)
        watched.observe(draft, list(range(len(draft))), Round(len(draft), len(draft), len(draft), 1 + len(draft)))
    voice = watched.tracker.voices["drafter",]
    assert watched.tracker.drawn(tree=False) and not watched.tracker.drawn(tree=True)
    assert voice.acceptance(True, 1)[0][0] > 0.9 and voice.acceptance(False, 1)[0][0] == 0.5


def test_the_same_past_gives_the_same_choice() -> None:
    runs = [Simulation(control(trees=(8, 16)), CHEAP, seed=5).run(300, lambda place: 0.5) for _ in range(2)]
    assert runs[0].budgets == runs[1].budgets


def test_no_depth_no_draft_and_wrong_settings() -> None:
    assert Simulation(AdaptiveControl(CHEAP, 0, tree_rows=(8,)), CHEAP).run(20, never).share_drafted(0) == 0.0
    with pytest.raises(ValueError, match="must not be negative"):
        AdaptiveControl(CHEAP, -1)


def test_live_costs_follow_the_clock() -> None:
    live = LiveCosts(CHEAP)
    assert live.round(Budget.chain(5)) == pytest.approx(CHEAP.round(Budget.chain(5)))
    for seconds in (0.08, 5.0, 0.08, 0.08):  # one hiccup
        live.learn(PLAIN, 1, 1, Round(0, 0, 0, 1, seconds=seconds))
    assert live.target(1) == pytest.approx(0.08)
    assert live.target(8) == pytest.approx(0.084)  # never seen: twice the table's, as all that was seen
    for _ in range(3):
        live.learn(Budget.chain(5), 6, 1, Round(5, 5, 0, 1, seconds=0.3, draft_total_seconds=0.2))
    assert live.draft(5, 1) == pytest.approx(0.2) and live.draft(1, 1) == pytest.approx(0.04)
    assert live.target(6) == pytest.approx(0.1)


def test_a_slower_machine_than_the_tables_stops_a_drafter_that_would_not_pay_there() -> None:
    """The table says drafts are cheap; the clock says they cost as much as five passes."""
    watched = AdaptiveControl(LiveCosts(CHEAP), 5)
    tried = 0
    for at in range(300):
        budget = watched.budget(1)
        tried += at >= 50 and budget.depth > 0
        draft = drafted(budget)
        path = [0] if len(draft) else []
        cost = 0.2 if budget.depth else 0.0
        watched.observe(
            draft, path, Round(len(draft), budget.depth, len(path), 1, seconds=0.04 + cost, draft_total_seconds=cost)
        )
    assert tried < 30
