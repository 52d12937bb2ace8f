"""Evaluation against drafters whose worth is known: none gives 1, an oracle K + 1, one that is always wrong 1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from heads.grow import Budget
from heads.target import Target
from infer.drafters import NoDrafter
from infer.evaluate import (
    Question,
    Settings,
    default_budgets,
    evaluate,
    measure_acceptance,
    probe_shape,
    summary,
    table,
)
from infer.lookahead import expected_tokens
from infer.metrics import Round, Stats
from infer.prompts import read_prompts
from infer.watch import RankCounts
from tests.infer.oracles import Oracle, Wrong, greedy_text
from tests.tiny import tiny_model

IDS = torch.tensor([[3, 9, 27, 17]])
ONE = [Question("1", "a", IDS)]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama"))


def tau(report: dict, name: str) -> float:
    return report["budgets"][name]["tokens_per_round"]["value"]


def test_the_empty_draft_gives_exactly_one(target: Target) -> None:
    report = evaluate(target, NoDrafter(), ONE, {"chain": Budget.chain(5)}, Settings(20))
    assert tau(report, "chain") == 1.0
    assert report["budgets"]["chain"]["accepted"] == report["budgets"]["chain"]["proposed"] == 0


@pytest.mark.parametrize("k", [1, 3, 5])
def test_an_oracle_gives_k_plus_one_and_the_wrong_drafter_one(target: Target, k: int) -> None:
    text = greedy_text(target, IDS, 60)
    whole = Settings(1 + 6 * (k + 1))  # the prefill's token and six whole rounds
    assert tau(evaluate(target, Oracle(text), ONE, {"k": Budget.chain(k)}, whole), "k") == k + 1
    assert tau(evaluate(target, Wrong(text), ONE, {"k": Budget.chain(k)}, whole), "k") == 1.0


def test_a_truncated_last_round_counts_as_it_was(target: Target) -> None:
    text = greedy_text(target, IDS, 60)
    block = evaluate(target, Oracle(text), ONE, {"k": Budget.chain(3)}, Settings(1 + 4 + 4 + 2))["budgets"]["k"]
    assert block["rounds"] == 3
    assert block["tokens_per_round"]["value"] == pytest.approx(10 / 3)
    assert block["tokens"] == 11


def test_half_right_is_counted_by_position(target: Target) -> None:
    """Every third token spoiled: by arithmetic of the places, each round accepts two of three and τ is 3."""
    text = greedy_text(target, IDS, 60)
    report = evaluate(target, Oracle(text, miss=3), ONE, {"k": Budget.chain(3)}, Settings(31))
    block = report["budgets"]["k"]
    log = []
    at, end = IDS.shape[1] + 1, IDS.shape[1] + 31
    while at < end:
        depth = min(3, end - at - 1)
        held = next((i for i in range(depth) if (at + i) % 3 == 0), depth)
        log.append(Round(depth, depth, held, held + 1))
        at += held + 1
    assert block["tokens_per_round"]["value"] == pytest.approx(30 / len(log))
    assert block["accepted_per_position"] == summary([Stats(31, log=log)])["accepted_per_position"]
    assert block["conditional_per_position"] == summary([Stats(31, log=log)])["conditional_per_position"]


def test_the_case_book_row_on_acceptance() -> None:
    """Four rounds, K = 3, accepted 3, 1, 0, 2."""
    block = summary([Stats(11, log=[Round(3, 3, accepted, accepted + 1) for accepted in (3, 1, 0, 2)])])
    assert block["tokens_per_round"]["value"] == 2.5
    assert block["acceptance_rate"] == 0.5
    assert block["accepted_per_position"] == [0.75, 0.5, 0.25]
    assert block["conditional_per_position"] == pytest.approx([0.75, 2 / 3, 0.5])


def test_loops_are_left_out_of_the_loop_free_figure() -> None:
    log = [Round(3, 3, 0, 1), Round(3, 3, 3, 4, looped=True), Round(3, 3, 1, 2)]
    block = summary([Stats(8, log=log)])
    assert block["tokens_per_round"]["value"] == pytest.approx(7 / 3)
    assert block["loop_free_tokens_per_round"]["value"] == pytest.approx(1.5)
    assert block["looped_rounds"] == 1


def test_rank_acceptance_finds_where_the_right_token_stands(target: Target) -> None:
    text = greedy_text(target, IDS, 60)
    acceptance = measure_acceptance(target, Oracle(text, lookahead=3, rank=1), ONE, Settings(31), chain=False)
    assert len(acceptance.ranks[0]) == 8
    assert [row[1] for row in acceptance.ranks[:2]] == [1.0, 1.0]
    assert all(value == 0.0 for row in acceptance.ranks for rank, value in enumerate(row) if rank != 1)
    budgets = default_budgets(3, acceptance.ranks, rows=(3,))
    assert budgets["static tree 3"].shape == ((1,), (1, 1))


def test_what_a_static_tree_promises_is_what_it_gives(target: Target) -> None:
    text = greedy_text(target, IDS, 60)
    drafter = Oracle(text, lookahead=3)
    acceptance = measure_acceptance(target, drafter, ONE, Settings(40))
    budgets = default_budgets(3, acceptance.ranks, rows=(4,))
    report = evaluate(target, drafter, ONE, budgets, Settings(1 + 4 * 6), ranks=acceptance.ranks)
    block = report["budgets"]["static tree 4"]
    assert block["shape"] == [[0], [0, 0], [0, 0, 0]]
    assert block["expected_tokens_per_round"] == block["tokens_per_round"]["value"] == 4.0


def test_rank_counts_follow_only_the_path_that_was_taken() -> None:
    from heads.draft import Draft

    draft = Draft((5, 6, 7, 8), (-1, -1, 1, 0), (None,) * 4)
    counts = RankCounts()
    counts.count(draft, [6, 7, 9])
    counts.count(draft, [4])
    counts.count(draft, [])
    assert counts.offered == [[2, 2], [1]]
    assert counts.taken == [[0, 1], [1]]
    assert counts.acceptance() == ((0.0, 0.5), (1.0,))
    both = RankCounts()
    both.add(counts)
    both.add(counts)
    assert both.offered == [[4, 4], [2]]


def test_the_probe_has_every_path_of_small_ranks() -> None:
    shape = probe_shape(5)
    assert len(shape) == 60
    Budget.static(shape)
    assert expected_tokens(probe_shape(1, ranks=3), ((0.5, 0.25, 0.125),)) == 1.875


def test_categories_and_the_table(target: Target) -> None:
    text = greedy_text(target, IDS, 60)
    questions = [Question("1", "writing", IDS), Question("2", "maths", IDS), Question("3", "maths", IDS)]
    report = evaluate(target, Oracle(text), questions, {"chain 2": Budget.chain(2)}, Settings(13))
    by = report["budgets"]["chain 2"]["by_category"]
    assert {name: block["prompts"] for name, block in by.items()} == {"writing": 1, "maths": 2}
    assert "maths" in table(report) and "3.00 [3.00, 3.00]" in table(report)
    json.dumps(report)


def test_sampling_is_repeatable(target: Target) -> None:
    text = greedy_text(target, IDS, 60)
    reports = [evaluate(target, Oracle(text), ONE, {"k": Budget.chain(3)}, Settings(20, 1.0, seed=3)) for _ in range(2)]
    assert reports[0] == reports[1]


def test_no_prompts_is_an_error(target: Target) -> None:
    with pytest.raises(ValueError, match="no prompts"):
        evaluate(target, NoDrafter(), [], {})


def test_prompt_files(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    rows: list[dict] = [
        {"question_id": 81, "category": "writing", "turns": ["one", "two"]},
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "x"},
            ]
        },
        {"prompt": "say", "category": "writing"},
        {"prompt": "more", "category": "writing"},
    ]
    file.write_text("\n\n".join(map(json.dumps, rows)))
    prompts = read_prompts(file, per_category=2)
    assert [(p.id, p.category) for p in prompts] == [("81", "writing"), ("3", "all"), ("5", "writing")]
    assert prompts[0].messages == [{"role": "user", "content": "one"}]
    assert [m["role"] for m in prompts[1].messages] == ["system", "user"]
    assert len(read_prompts(file, limit=1)) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "ok"}\n{"text": "x"}', "line 2.*needs one of"),
        ('{"prompt": "ok"}\n{"prompt": ', "line 2 is no JSON"),
        ('["a"]', "no JSON object"),
        ('{"turns": []}', "line 1"),
        ('{"prompt": ""}', "no text"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "no user turn"),
        ("", "holds no prompt"),
    ],
)
def test_bad_prompt_files_name_the_line(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(line)
    with pytest.raises(ValueError, match=message):
        read_prompts(file)
