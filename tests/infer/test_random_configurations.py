"""A share of the random configurations; ``python -m tests.infer.random_configurations --count 1000`` runs them all."""

from __future__ import annotations

import pytest
import torch

from heads.draft import Draft
from infer import verify
from infer.verify import At, Chooser, Verdict
from tests.infer.configurations import DRAFTS, MODELS, draw
from tests.infer.random_configurations import compare, main


@pytest.mark.parametrize("part", range(4))
def test_no_difference_from_model_generate(part: int) -> None:
    different = {}
    for number in range(10 * part, 10 * part + 10):
        problem = compare(draw(number))
        if problem:
            different[number] = problem
    assert not different


def test_a_number_is_always_the_same_configuration() -> None:
    assert [draw(number) for number in range(50)] == [draw(number) for number in range(50)]


def test_everything_is_drawn() -> None:
    drawn = [draw(number) for number in range(1000)]
    assert {c.model for c in drawn} == set(MODELS)
    assert {c.draft for c in drawn} == set(DRAFTS)
    assert {c.way for c in drawn} == {"generate", "custom", "prefix", "stream"}
    assert {len(c.prompts) for c in drawn} == {1, 2, 3}
    assert sum(c.ragged for c in drawn) > 100
    assert {c.draft for c in drawn if c.controlled} == set(DRAFTS)
    assert sum(bool(c.settings["do_sample"]) for c in drawn) > 200
    for name in ("repetition_penalty", "alternating", "eos_token_id", "stop_strings", "criterion", "max_length"):
        assert sum(name in c.settings for c in drawn) > 50, name


def test_a_wrong_rule_is_noticed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: the last accepted token is followed by the runner-up, now and then."""
    real = verify.greedy

    def wrong(draft: Draft, at: At, chooser: Chooser) -> Verdict:
        verdict = real(draft, at, chooser)
        if len(verdict.path) < 2:
            return verdict
        scores = at.scores(verdict.path[-1]) if hasattr(at, "scores") else torch.zeros(2)
        return Verdict(verdict.path, int(scores.topk(2).indices[1]))

    monkeypatch.setattr(verify, "greedy", wrong)
    monkeypatch.setitem(verify.RULES, "greedy", wrong)
    assert main(["--count", "40"]) == 1
    assert "tokens: " in capsys.readouterr().out
