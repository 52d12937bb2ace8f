"""Measured costs: every size asked for is there, in real rounds; kept on disk; the refusals name what lacks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.draft import Draft
from heads.grow import Budget, Sampler
from heads.target import Target
from infer import controls, cost_store
from infer import costs as costs_module
from infer.costs import measure_batches, measure_costs
from infer.drafters import NoDrafter
from infer.generate import generate
from infer.live import LiveCosts
from infer.lookahead import Acceptance, CostTable, candidates
from tests.infer.oracles import Oracle, greedy_text
from tests.tiny import tiny_model

IDS = torch.tensor([[3, 9, 27, 17]])


class Slow(Oracle):
    """Ten milliseconds a step, more than a busy machine loses by chance."""

    def propose(self, budget: Budget, sampler: Sampler | None) -> Draft:
        time.sleep(0.01 * budget.depth)
        return super().propose(budget, sampler)


def test_all_sizes_are_timed_and_feed_the_choice() -> None:
    target = Target(tiny_model("llama"))
    drafter = Slow(greedy_text(target, IDS, 200), lookahead=4)
    costs = measure_costs(target, drafter, IDS, rows=(1, 2, 5), repeats=3)
    assert sorted(costs.rows) == [1, 2, 5]
    assert sorted(costs.drafts) == [(d, w) for d in (1, 2, 4) for w in (1, 8)]
    assert all(seconds > 0 for seconds in costs.rows.values())
    assert 0.01 <= costs.draft(1, 1) < costs.draft(4, 1)
    assert costs.settings["dtype"] == "float64"
    assert candidates(costs, Acceptance(joint=(1.0,) * 4))


def test_no_draft_has_no_draft_costs() -> None:
    costs = measure_costs(Target(tiny_model("llama")), NoDrafter(), IDS, rows=(1, 4), repeats=2)
    assert costs.drafts == {}
    assert costs.draft(0, 1) == 0.0


def test_positions_that_are_spent_are_begun_anew() -> None:
    """Sixty rounds of up to 5 tokens do not fit 32 positions at once."""
    target = Target(tiny_model("llama", max_position_embeddings=32))
    costs = measure_costs(target, NoDrafter(), IDS, rows=(1, 2, 4), repeats=20)
    assert sorted(costs.rows) == [1, 2, 4]


def test_too_few_positions_are_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="positions"):
        measure_costs(Target(tiny_model("llama")), NoDrafter(), IDS, rows=(1, 600), repeats=1)


def test_more_rows_are_never_cheaper() -> None:
    assert costs_module._rising({4: 2.0, 1: 1.0, 2: 3.0}) == {1: 1.0, 2: 3.0, 4: 3.0}


def test_batches_are_timed() -> None:
    found = measure_batches(Target(tiny_model("llama")), IDS, (2, 3), rows=(1, 4), repeats=2)
    assert {batch: sorted(rows) for batch, rows in found.items()} == {2: [1, 4], 3: [1, 4]}
    assert all(seconds > 0 for rows in found.values() for seconds in rows.values())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    return tmp_path / "costs"


def test_costs_are_measured_once_and_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny_model("llama"))
    drafter = Oracle(greedy_text(target, IDS, 20), lookahead=2)
    first = cost_store.stored_costs(target, drafter, IDS)
    monkeypatch.setattr(cost_store, "measure_costs", None)  # would raise
    assert cost_store.stored_costs(target, drafter.fork(), IDS) == first
    assert [path.suffix for path in cache.iterdir()] == [".json"]  # nothing half-written stays


def test_another_target_drafter_or_thread_count_has_another_table(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, other = Target(tiny_model("llama")), Target(tiny_model("llama", layers=2))
    drafter = Oracle(torch.ones(1, 9, dtype=torch.long), lookahead=2)
    places = {
        cost_store.place(target, drafter),
        cost_store.place(other, drafter),
        cost_store.place(target, NoDrafter()),
        cost_store.place(target, Oracle(torch.ones(1, 9, dtype=torch.long), lookahead=3)),
    }
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert len({*places, cost_store.place(target, drafter)}) == 5
    assert all(place.parent == cache for place in places)


def test_the_first_of_two_processes_wins(cache: Path) -> None:
    target = Target(tiny_model("llama"))
    where = cost_store.place(target, NoDrafter())
    first, second = (CostTable(rows={1: seconds}, drafts={}, context=1) for seconds in (1.0, 2.0))
    cost_store._write(where, first)
    cost_store._write(where, second)
    assert cost_store.stored_costs(target, NoDrafter(), IDS) == first


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": {}}', '{"rows": 3}'])
def test_a_spoiled_table_says_what_to_do(cache: Path, text: str) -> None:
    target = Target(tiny_model("llama"))
    where = cost_store.place(target, NoDrafter())
    where.parent.mkdir(parents=True)
    where.write_text(text)
    with pytest.raises(ValueError, match="delete it"):
        cost_store.stored_costs(target, NoDrafter(), IDS)


@pytest.mark.parametrize("positions", [24, 64, 512])
def test_small_targets_are_timed_with_fewer_sizes(cache: Path, positions: int) -> None:
    target = Target(tiny_model("llama", max_position_embeddings=positions))
    table = cost_store.stored_costs(
        target, Oracle(torch.ones(1, 600, dtype=torch.long), lookahead=1), torch.tensor([[5]])
    )
    assert {1, 2} <= set(table.rows) and table.context <= positions // 4


def test_a_seeded_control_reads_no_clock(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny_model("llama"))
    drafter = Oracle(greedy_text(target, IDS, 20), lookahead=2)
    seeded = controls.make(target, drafter, IDS, seed=3)
    free = controls.make(target, drafter, IDS)
    assert seeded is not None and free is not None
    assert isinstance(seeded.costs, CostTable) and isinstance(free.costs, LiveCosts)
    assert controls.make(target, NoDrafter(), IDS) is None
    bounded = controls.make(target, drafter, IDS, seed=3, budget=Budget.chain(1))
    assert bounded is not None and bounded.chains == [Budget.chain(1)] and not bounded._trees


def test_the_same_seed_gives_the_same_text_and_greedy_text_is_the_targets(cache: Path) -> None:
    """Through the public call, costs measured by the first of them."""
    target = Target(tiny_model("llama"))
    text = greedy_text(target, IDS, 60)
    drafter = Oracle(text, lookahead=3, miss=7)
    settings: dict[str, Any] = {"draft": drafter, "control": "auto", "max_new_tokens": 40}
    greedy = generate(target, IDS, do_sample=False, **settings)
    assert greedy.sequences.tolist() == text[:, : IDS.shape[1] + 40].tolist()
    assert greedy.stats.rounds < 39  # it did draft
    drawn = [generate(target, IDS, seed=5, do_sample=True, temperature=1.5, top_k=0, **settings) for _ in range(2)]
    assert drawn[0].sequences.tolist() == drawn[1].sequences.tolist() != greedy.sequences.tolist()
    assert [r.proposed for r in drawn[0].stats.log] == [r.proposed for r in drawn[1].stats.log]
    assert len(list(cache.iterdir())) == 1
