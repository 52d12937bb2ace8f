"""``headstart stability``: counts texts that a draft changed, and sees it when passes are not stable."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from heads.grow import Budget
from heads.target import Target
from infer import drafters, passes, stability_verb
from infer.evaluate import Question
from infer.stability import PLAIN, Replay, measure, shapes, table
from tests.tiny import tiny_model

NEW = 40
WAYS = [PLAIN, "right chains", "ragged chains", "trees", "lookup"]


def questions(count: int) -> list[Question]:
    draw = torch.Generator().manual_seed(3)
    return [Question(str(at), "made", torch.randint(0, 64, (1, 20 + at), generator=draw)) for at in range(count)]


def close_calls() -> Target:
    """A target whose logits differ by little more than bfloat16 rounding."""
    model = tiny_model("llama", dtype=torch.bfloat16, layers=2)
    weight = model.get_output_embeddings().weight
    with torch.no_grad():
        weight.copy_(weight[:1].clone() + 0.02 * weight)
    return Target(model)


def test_counts_and_cost() -> None:
    target = close_calls()
    asked = questions(3)
    report = measure(target, asked, {"lookup": (drafters.make("lookup", None, target), None)}, max_new_tokens=NEW)
    assert report["rows"] == 8 and report["prompts"] == 3 and report["dtype"] == "bfloat16"
    assert list(report["stable"]) == list(report["usual"]) == WAYS
    assert all(cell["same"] == 3 and cell["differences"] == [] for cell in report["stable"].values())
    assert report["usual"][PLAIN]["same"] == 3
    assert sum(cell["same"] for cell in report["usual"].values()) < 3 * len(WAYS), "passes of other shapes change texts"
    found = [part for cell in report["usual"].values() for part in cell["differences"]]
    assert all(0 <= part["gap"] < 0.1 and part["prompt"] in "012" for part in found)
    assert report["stable"]["right chains"]["passes"] < report["stable"][PLAIN]["passes"] / 4
    assert all(ratio > 0 for ratio in report["cost"].values())
    text = table(report)
    assert "trees" in text and "stable=8" in text and "texts part where two logits are" in text


def test_differences_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one row a pass for none and eight for all others, ``stable`` without its attention is caught."""
    monkeypatch.setattr(passes, "stable_passes", lambda target: nullcontext())
    monkeypatch.setattr(passes, "fixed_rows", lambda stable: None)
    report = measure(close_calls(), questions(3), max_new_tokens=NEW)
    assert any(cell["same"] < 3 for cell in report["stable"].values())


def test_fewer_prompts_in_the_usual_way() -> None:
    target = close_calls()
    given = shapes("lookup", drafters.make("lookup", None, target), 8)
    report = measure(target, questions(3), given, max_new_tokens=NEW, usual=1, replays=False)
    assert list(report["stable"]) == [PLAIN, "lookup, chain", "lookup, tree"] == list(report["usual"])
    assert [cell["prompts"] for cell in report["stable"].values()] == [3] * 3
    assert [cell["prompts"] for cell in report["usual"].values()] == [1] * 3
    assert list(report["cost"]) == ["usual pass of one row"]
    assert "3/3" in table(report) and "1/1" in table(report)
    alone = measure(target, questions(1), given, max_new_tokens=4, usual=0, replays=False)
    assert alone["usual"] == {} and "as usual" not in table(alone) and alone["cost"] == {}


def test_no_prompts_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs prompts"):
        measure(close_calls(), [])


@pytest.mark.parametrize(
    "replay", [Replay([*range(40)]), Replay([*range(40)], ragged=1), Replay([*range(40)], wide=True)]
)
def test_replays_keep_to_the_budget(replay: Replay) -> None:
    replay.begin(Target(tiny_model("llama", layers=1)), torch.arange(10)[None], None)
    lengths = set()
    for _ in range(20):
        draft = replay.propose(Budget(rows=8, depth=7, width=2), None)
        lengths.add(len(draft))
        assert len(draft) <= 7
        assert replay.ragged is not None or 10 in draft.tokens
    assert (len(lengths) > 3) == (replay.ragged is not None)
    replay.commit(None, [0] * 29)
    assert len(replay.propose(Budget.chain(7), None)) <= 2
    assert replay.fork().propose(Budget.chain(0), None).tokens == ()


def test_the_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    target = close_calls()
    monkeypatch.setattr(Target, "load", lambda name, **_: target)
    monkeypatch.setattr(target, "_tokenizer", object())
    monkeypatch.setattr(stability_verb, "ask", lambda prompts, tokenizer: questions(1))
    parser = argparse.ArgumentParser()
    stability_verb.configure(parser)
    report, text = run(parser, "--target", "tiny", "--rows", "4", "--max-new-tokens", "12")
    assert report["ok"] is True and report["rows"] == 4 and "stable=4" in text
    with pytest.raises(ValueError, match="one of them"):
        run(parser)


def run(parser: argparse.ArgumentParser, *argv: str) -> Any:
    return stability_verb.run(parser.parse_args(argv))
