"""Training mtp heads: inside the target, whose weights stay; the loss falls, and a stopped run goes on alike."""

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
from tests.train.world import log_of, losses, run
from train.interrupt import Interrupted

MTP = ("--heads.kind", "mtp", "--heads.taps", "null", "--heads.options.lora_r", 8, "--heads.options.anchors", 0.5)


def test_the_loss_falls_and_what_is_left_decodes(
    world: Path, launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``data.features`` is cached by default, and nothing is cached: that is said."""
    report = launch(*MTP, "--train.max_steps", 40, "--train.lr", "1e-2", "--eval.every", 15)
    assert "states: computed each step, since mtp heads are trained inside the target" in capsys.readouterr().err
    assert not (world / "cache").exists()
    values = losses(world / "run")
    assert sum(values[s] for s in range(36, 41)) < 0.9 * sum(values[s] for s in range(1, 6))
    terms = {name for line in log_of(world / "run") for name in line if name.startswith("train/")}
    assert {"train/soft_ce/1", "train/base_soft_ce/1", "train/consistency/1"} <= terms
    assert report["decoded"]["prompts"] == 3
    target = Target.load(str(world / "target"), dtype=torch.float32)
    assert report["target_sha256"] == target.weights_hash()
    heads = DraftHeads.from_pretrained(world / "run" / "heads", target)
    stored = load_file(world / "run" / "heads" / "heads.safetensors")
    assert {name.partition(".")[0] for name in stored} == {"base_model", "masks", "sampler", "target_ids"}
    ids = torch.tensor([[1, 2, 3, 4]])
    plain = target.model.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(generate(target.model, ids, heads, max_new_tokens=12, do_sample=False).sequences, plain)


def test_a_stopped_run_goes_on_alike(world: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    dropout = ("--heads.options.lora_dropout", 0.1)
    short: tuple[Any, ...] = (*MTP, *dropout, "--train.max_steps", 4, "--eval.prompts", 0)
    launch(*short, "--output.folder", world / "whole")
    with monkeypatch.context() as patch:
        signal_at(patch, 2, signal.SIGTERM)
        with pytest.raises(Interrupted):
            launch(*short)
    launch(*short)
    assert losses(world / "run") == losses(world / "whole")
    once, twice = (load_file(world / run / "heads" / "heads.safetensors") for run in ("whole", "run"))
    assert once.keys() == twice.keys() and all(torch.equal(once[name], twice[name]) for name in once)


def test_a_spread_target_is_refused(launch: Launch) -> None:
    with pytest.raises(ValueError, match="mtp heads are trained inside a target that is whole"):
        launch(*MTP, "--target.placement", "inside", "--train.max_steps", 1)


def test_two_processes_take_the_steps_of_one(world: Path) -> None:
    """Every parameter gets a gradient on each of them, and all rows are drafted from, so that nothing is drawn."""
    whole = (*MTP[:-1], 1.0, "--train.max_steps", 3, "--eval.prompts", 0, "--eval.conversations", 0)
    for processes in (0, 2):
        folder = world / f"run-{processes}"
        words = ["--config", world / "recipe.yaml", *whole, "--output.folder", folder]
        done = run([str(word) for word in words], processes=processes)
        assert done.returncode == 0, done.stderr
    one, two = losses(world / "run-0"), losses(world / "run-2")
    assert sorted(one) == [1, 2, 3] and two == pytest.approx(one, rel=1e-4)
