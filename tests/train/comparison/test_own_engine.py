"""A peer's own engine: its counts as we count, and a job that is not done twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from heads.target import Target
from infer.evaluate import Question
from tests.heads.small import random_ids
from tests.train.peers import fake_economize
from train.compare.own_engine import decode, stats_of


def test_rounds_end_where_the_text_does() -> None:
    tokens = [5, 6, 7, 8, 9, 10]
    stats = stats_of(tokens, [[7, 1], [7, 7]])
    assert [(one.accepted, one.emitted) for one in stats.log] == [(1, 2), (3, 3)]
    assert (stats.tokens, stats.tokens_per_round) == (6, 2.5)
    assert stats_of(tokens, [[7, 4], [7, 0]]).rounds == 1, "what was drafted for a text that had ended is no round"
    with pytest.raises(ValueError, match="2 rounds make 4 of 6 tokens"):
        stats_of(tokens, [[7, 0], [7, 1]])


def test_it_is_given_the_prompts_and_asked_once(world: Path, in_process: list[list[str]]) -> None:
    target = Target.load(str(world / "target"))
    questions = [Question(str(seed), "all", random_ids(5, seed=seed)) for seed in (1, 2)]
    (world / "checkpoint").mkdir()
    (world / "checkpoint" / "economize_model.safetensors").touch()

    def asked(tokens: int) -> dict[str, object]:
        python, folder = Path("python"), world / "checkpoint"
        return decode("economize", python, folder, target, questions, tokens, 1, world / "own")

    found = asked(7)
    assert found["version"] == "0.3.2" and found["chain 7"]["prompts"] == 2  # type: ignore[index]
    ids, count, decoding, _ = fake_economize.calls["decoded"][0]
    assert (ids, count, decoding.cycle_length) == (questions[0].ids[0].tolist(), 7, 8)
    assert fake_economize.calls["checkpoint"] == ["economize_model.safetensors"]
    assert asked(7) == found and len(in_process) == 1
    asked(4)
    assert len(in_process) == 2, "another length is another job"
