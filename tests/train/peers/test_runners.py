"""Each runner gives its trainer the very steps that were handed over, and says truthfully what was made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from heads.formats import read_heads
from tests.train.peers import fake_economize, fake_speculators
from tests.train.peers.conftest import contest_of, handed
from train.peers.contest import CONTENDERS, Contender, Contest

CONTENDER = {one.name: one for one in CONTENDERS}
ECONOMIZE, SPECULATORS = CONTENDER["economize, online"], CONTENDER["speculators, cached"]


def shown(contest: Contest, contender: Contender, **options: object) -> list[list[int]]:
    """Train every conversation once, and in which steps."""
    steps = contest.plan(40)
    contest.run(contender, 40, steps, **options)  # type: ignore[arg-type]
    return steps


@pytest.mark.parametrize("name", CONTENDER)
def test_what_was_asked_for_is_trained(name: str, world: Path, in_process: list[list[str]]) -> None:
    contest = contest_of(world)
    steps = contest.plan(40)
    done = contest.run(CONTENDER[name], 40, steps)
    texts = contest.handover.conversations
    for step, told in zip(steps, done.result["steps"], strict=True):
        assert told["tokens"] == sum(int(texts.lengths[i]) for i in step)
        assert told["supervised"] == sum(int(texts.loss_mask(i).sum()) for i in step)
        assert told["seconds"] > 0
    assert done.rate() == sum(s["tokens"] for s in done.timed) / sum(s["seconds"] for s in done.timed)
    assert len(done.timed) == len(steps) - 2 > 1 and done.result["checkpoint"] == ""
    assert in_process[0][1] == "-m" and in_process[0][3].endswith("job.json")


def test_economize_marks_the_position_before_a_token(world: Path, in_process: list[list[str]]) -> None:
    contest = contest_of(world)
    steps = shown(contest, ECONOMIZE)
    texts, calls = contest.handover.conversations, fake_economize.calls
    given = [(one.input_ids, one.loss_mask) for batch in calls["batches"] for one in batch]
    for index, (ids, mask) in zip([i for step in steps for i in step], given, strict=True):
        assert torch.equal(ids, texts.ids(index))
        assert mask.tolist() == [*texts.loss_mask(index).int().tolist()[1:], 0]
    assert calls["objective"].steps == 3 and calls["objective"].step_decay == 0.8
    wanted = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.0, "schedule": "cosine", "grad_clip": 1.0}
    assert {name: calls[name] for name in wanted} == wanted
    assert calls["autocast"] is None and calls["target"].dtype == torch.float32


def test_economizes_checkpoint_is_imported(world: Path, in_process: list[list[str]]) -> None:
    contest = contest_of(world)
    done = contest.run(ECONOMIZE, 64, contest.plan(64)[:3], keep=True, lr=0.5)
    back = read_heads(done.folder / done.result["checkpoint"], contest.handover.target)
    assert back.format == "economize" and torch.equal(back.heads.target_ids, contest.handover.heads.target_ids)
    assert back.heads.config.options == contest.handover.heads.config.options
    assert fake_economize.calls["lr"] == 0.5
    assert [step["loss"] for step in done.result["steps"]] == [9.0, 8.0, 7.0]
    assert done.result["steps"][0]["accuracy"] == [0.1, 0.2, 0.3]


def test_speculators_reads_our_states_end_to_end(world: Path, in_process: list[list[str]]) -> None:
    contest = contest_of(world)
    steps = shown(contest, SPECULATORS)
    texts, calls = contest.handover.conversations, fake_speculators.calls
    for step, batch in zip(steps, calls["batches"], strict=True):
        assert torch.equal(batch["input_ids"][0], torch.cat([texts.ids(i)[1:] for i in step]))
        assert torch.equal(batch["loss_mask"][0].bool(), torch.cat([texts.loss_mask(i)[1:] for i in step]))
    assert calls["device"] == torch.device("cpu")
    ids = contest.handover.heads.target_ids
    assert torch.equal(calls["d2t"] + torch.arange(100), ids) and torch.equal(calls["t2d"].nonzero()[:, 0], ids)
    assert (calls["ttt_steps"], calls["draft_attn_impl"], calls["norm_before_residual"]) == (3, "sdpa", False)
    assert calls["layer"].rope_parameters["rope_theta"] == 10000.0 and calls["layer"].rms_norm_eps == 1e-5
    result = json.loads((world / "runs" / "001-speculators-cached-40" / "result.json").read_text())
    assert result["frozen"] == ["lm_head.weight"] and result["steps"][0]["accuracy"] == [0.5, 0.25]


def test_economize_refuses_norms_that_it_lacks(world: Path, in_process: list[list[str]]) -> None:
    contest = contest_of(world, "--heads.options.fc_norm=true")
    with pytest.raises(ValueError, match="economize has neither fc_norm nor norm_output"):
        shown(contest, ECONOMIZE)


def test_a_trainer_that_trains_something_else_is_found_out(world: Path, in_process: list[list[str]]) -> None:
    contest = contest_of(world)
    contest.wanted["lookahead"] = 7
    with pytest.raises(ValueError, match=r"economize, online trained other heads .* lookahead 3 where 7 was asked"):
        shown(contest, ECONOMIZE)


def test_a_trainer_that_leaves_data_out_is_found_out(
    world: Path, in_process: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    contest = contest_of(world)
    whole = handed(world).conversations
    monkeypatch.setattr(type(whole), "loss_mask", lambda self, index: ~whole.ids(index).bool())
    with pytest.raises(ValueError, match=r"did not train the . steps that it was given"):
        shown(contest, SPECULATORS)
