"""Training block heads: the loss falls, anchors are counted whatever happens between, a stopped run goes on alike."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from heads import DraftHeads, Target
from infer import generate
from tests.train.conftest import Launch
from tests.train.test_loop import signal_at
from tests.train.world import log_of, losses
from train.interrupt import Interrupted

BLOCK = ("--heads.kind", "block", "--heads.options.confidence", "true", "--heads.options.markov_rank", 8)


def test_the_loss_falls_and_what_is_left_decodes(world: Path, launch: Launch) -> None:
    """Evaluations between steps put the heads in eval mode, where every row counts; a step counts anchors again."""
    loss = ("--train.loss.soft_ce", 0.1, "--train.loss.tv", 1.8)
    report = launch(*BLOCK, *loss, "--train.max_steps", 40, "--train.lr", "1e-2", "--eval.every", 15)
    values = losses(world / "run")
    assert sum(values[s] for s in range(36, 41)) < 0.9 * sum(values[s] for s in range(1, 6))
    told = [line["train/confidence/1"] for line in log_of(world / "run") if "train/confidence/1" in line]
    assert len(told) == 40 and all(0 < value < 2 for value in told)
    assert report["decoded"]["prompts"] == 3
    heads = DraftHeads.from_pretrained(world / "run" / "heads", Target.load(str(world / "target"), dtype=torch.float32))
    ids = torch.tensor([[1, 2, 3, 4]])
    plain = heads.target.model.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(generate(heads.target.model, ids, heads, max_new_tokens=12, do_sample=False).sequences, plain)


def test_a_stopped_run_draws_the_anchors_it_would_have_drawn(
    world: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    short: tuple[Any, ...] = (*BLOCK, "--train.max_steps", 4, "--eval.prompts", 0)
    launch(*short, "--output.folder", world / "whole")
    with monkeypatch.context() as patch:
        signal_at(patch, 2, signal.SIGTERM)
        with pytest.raises(Interrupted):
            launch(*short)
    launch(*short)
    assert losses(world / "run") == losses(world / "whole")
    once, twice = (load_file(world / run / "heads" / "heads.safetensors") for run in ("whole", "run"))
    assert once.keys() == twice.keys() and all(torch.equal(once[name], twice[name]) for name in once)
