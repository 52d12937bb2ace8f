"""Ways to draft beside each other: figures by category, identity, what does not apply; batch × look-ahead."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from heads.target import Target
from infer import compare as module
from infer import saturation, timing
from infer.compare import EXIT, GENERATE, LOOKUP, LOOP, alternating, compare, table, ways
from infer.drafters import NoDrafter
from infer.evaluate import Question
from infer.timing import Run
from tests.infer.oracles import Oracle, greedy_text
from tests.tiny import tiny_model

IDS = torch.tensor([[3, 9, 27, 17]])
QUESTIONS = [Question("1", "writing", IDS), Question("2", "maths", IDS), Question("3", "maths", IDS)]
WARM = [Question("warm", "a", IDS)]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", max_position_embeddings=4096))


@pytest.fixture(scope="module")
def oracle(target: Target) -> Oracle:
    return Oracle(greedy_text(target, IDS, 100), lookahead=3)


def test_every_way_at_every_temperature(target: Target, oracle: Oracle) -> None:
    arms = ways(target, {"oracle": oracle, "none": NoDrafter()}, control="fixed")
    report = compare(target, arms, QUESTIONS, WARM, (0.0, 0.8), max_new_tokens=13)
    assert list(report["temperatures"]) == ["0", "0.8"] and report["not_applicable"] == {}
    block = report["temperatures"]["0"]
    assert list(block["ways"]) == [GENERATE, LOOP, "oracle", "none", LOOKUP, EXIT]
    assert block["baseline"] in (GENERATE, LOOP)
    for figures in block["ways"].values():
        assert {name: row["prompts"] for name, row in figures.items()} == {"all": 3, "writing": 1, "maths": 2}
        assert figures["all"]["identical"] == 3 and figures["all"]["tokens"] == 39
        assert figures["all"]["speedup"] > 0
    assert block["ways"]["oracle"]["maths"]["tokens_per_round"] == 4.0
    assert block["ways"]["none"]["all"]["tokens_per_round"] == 1.0
    assert 0 < block["ways"]["oracle"]["all"]["forward_share"] <= 1 and "forward_share" not in block["ways"][LOOKUP]
    assert "identical" not in report["temperatures"]["0.8"]["ways"]["oracle"]["all"]
    json.dumps(report)
    text = table(report)
    assert "temperature 0.8" in text and "transformers early exit" in text and "maths" in text and "(sampled)" in text


def test_ctrl_c_keeps_what_every_way_has_answered(target: Target, oracle: Oracle) -> None:
    asked: list[str] = []

    def interrupted(question: Question, new: int, temperature: float, seed: int) -> Run:
        asked.append(question.id)
        if len(asked) == 4:  # one to warm up, then the third prompt
            raise KeyboardInterrupt
        return timing.loop(target, oracle, question, None, new, temperature, seed)

    arms = ways(target, {}) | {"interrupted": interrupted}
    report = compare(target, arms, QUESTIONS, WARM, (0.0,), max_new_tokens=5)
    assert asked == ["warm", "1", "2", "3"], "one of each category first"
    block = report["temperatures"]["0"]["ways"]
    assert report["stopped"] is True
    assert {name: row["prompts"] for name, row in block["interrupted"].items()} == {"all": 2, "writing": 1, "maths": 1}
    assert "stopped after 2 prompts" in table(report)
    asked[:] = ["", ""]
    with pytest.raises(KeyboardInterrupt):
        compare(target, arms, QUESTIONS, WARM, (0.0,), max_new_tokens=5)


def test_prompts_of_different_categories_take_turns() -> None:
    each = [Question(str(at), kind, IDS) for at, kind in enumerate("aabbba")]
    assert [question.id for question in alternating(each)] == ["0", "2", "1", "3", "4", "5"]


def test_a_way_of_transformers_that_fails_is_named_with_its_reason(target: Target, oracle: Oracle) -> None:
    def broken(*_: object) -> Run:
        target.config.num_hidden_layers = 1
        raise RuntimeError("no early exit here")

    layers = target.config.num_hidden_layers
    arms = ways(target, {"oracle": oracle}, control="fixed") | {EXIT: broken}
    report = compare(target, arms, QUESTIONS, WARM, max_new_tokens=5)
    assert report["not_applicable"] == {EXIT: "RuntimeError: no early exit here"}
    assert target.config.num_hidden_layers == layers
    assert "transformers early exit: not applicable: RuntimeError: no early exit here" in table(report)
    with pytest.raises(RuntimeError):  # of ours, it is an error
        compare(target, arms | {"oracle": broken}, QUESTIONS, WARM, max_new_tokens=5)
    target.config.num_hidden_layers = layers


def test_a_wrong_text_shows(target: Target, oracle: Oracle) -> None:
    arms = ways(target, {"oracle": oracle}, control="fixed")
    honest = arms["oracle"]

    def spoiled(question: Question, new: int, temperature: float, seed: int) -> Run:
        run = honest(question, new, temperature, seed)
        return replace(run, tokens=[*run.tokens[:5], (run.tokens[5] + 1) % 64, *run.tokens[6:]])

    report = compare(target, arms | {"oracle": spoiled}, QUESTIONS[:1], WARM, max_new_tokens=13)
    row = report["temperatures"]["0"]["ways"]["oracle"]["all"]
    assert (row["identical"], row["near_ties"]) == (0, 0)


def test_look_ahead_control_is_asked_for(target: Target, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def watch(*args: object) -> Run:
        asked.append(args[-2:])
        return Run([1, 2], [1, 1], 0.1, [0.1])

    monkeypatch.setattr(module, "loop", watch)
    for name in ("auto", "fixed"):
        ways(target, {"oracle": oracle}, control=name, top_p=0.9)["oracle"](QUESTIONS[0], 4, 0.0, 0)
    assert asked == [("auto", 0.9), ("fixed", 0.9)]


def test_prompts_are_kept_apart(target: Target) -> None:
    with pytest.raises(ValueError, match="both timed and used"):
        compare(target, ways(target, {}), WARM, WARM)
    with pytest.raises(ValueError, match="other prompts"):
        compare(target, ways(target, {}), QUESTIONS, [])


def test_groups_of_assisted_decoding_are_its_rounds() -> None:
    run = Run([*range(9)], [3, 4, 2], 0.1, [1.0, 1.0])
    assert timing.tokens_per_round([run]) == 3.0 and timing.tokens_per_round([]) == 0.0
    assert run.free == [True, True]
    loops = Run([*range(8), *range(8)], [8, 8], 0.1, [1.0])
    assert loops.free == [False] and timing.tokens_per_round([loops], without_loops=True) == 0.0


def test_a_table_of_batch_and_depth(target: Target, oracle: Oracle) -> None:
    report = saturation.saturation(target, oracle, QUESTIONS, [2, 1], [2], max_new_tokens=13, repeats=1)
    assert {b: list(rates) for b, rates in report["rates"].items()} == {"1": ["0", "2"], "2": ["0", "2"]}
    assert report["tokens_per_round"] == {"1": {"0": 1.0, "2": 3.0}, "2": {"0": 1.0, "2": 3.0}}
    assert all(rate > 0 for rates in report["rates"].values() for rate in rates.values())
    json.dumps(report)
    assert "batch 2" in saturation.table(report) and "K = 2" in saturation.table(report)
    with pytest.raises(ValueError, match="batches of 1 or more"):
        saturation.saturation(target, oracle, QUESTIONS, [0], [2])


def test_where_drafting_stops_paying() -> None:
    assert saturation._turn({1: 4, 4: 2, 16: 0, 32: 0}) == 16
    assert saturation._turn({1: 4, 4: 0, 16: 2}) is None
    assert saturation._turn({1: 0, 4: 0}) == 1
    report = {
        "target": "t",
        "settings": {"dtype": "float32", "device": "cpu", "threads": 1, "repeats": 3},
        "rates": {"1": {"0": 10.0, "4": 20.0}, "16": {"0": 100.0, "4": 80.0}},
        "tokens_per_round": {"1": {"0": 1.0, "4": 3.25}, "16": {"0": 1.0, "4": 3.0}},
        "best": {"1": 4, "16": 0},
        "stops_paying_at": 16,
    }
    assert "drafting stops paying at batch 16" in saturation.table(report)
    assert "4 (×2.00)" in saturation.table(report) and "3.25" in saturation.table(report)


def test_each_repeat_is_of_other_prompts_the_same_for_every_depth(
    target: Target, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[tuple[int, int], list[str]]] = []

    def cell(
        target: Target, drafter: Oracle, questions: list[Question], pair: tuple[int, int], new: int
    ) -> saturation.Cell:
        asked.append((pair, [question.id for question in questions]))
        return saturation.Cell(1, 1, 1.0)

    monkeypatch.setattr(saturation, "_cell", cell)
    few = [replace(QUESTIONS[0], id=name) for name in "abc"]
    saturation.saturation(target, oracle, few, [2], [2], repeats=3)
    assert asked[1:] == [((2, d), list(names)) for names in ("ab", "ca", "bc") for d in (0, 2)]
