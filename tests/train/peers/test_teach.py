"""A peer's heads come home: trained on the steps of our own recipe, imported, and decoded by our engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import infer
from heads.base import DraftHeads
from heads.target import Target
from tests.train.peers import fake_economize
from train.peers import teach
from train.peers.teach import steps_of
from train.settings import load

OFF = ("--set", "heads.options.fc_norm=false", "--set", "heads.options.norm_output=false")


def words(world: Path, *more: str) -> list[str]:
    place = ["--config", str(world / "recipe.yaml"), "--python", "here", "--work", str(world / "work")]
    return ["economize", *place, "--steps", "9", "--lr", "0.25", "--out", str(world / "out"), *more]


def test_heads_come_home(world: Path, in_process: list[list[str]]) -> None:
    assert teach.main(words(world, *OFF)) == 0
    assert sorted(path.name for path in (world / "out").iterdir()) == [
        "checkpoint", "curve.jsonl", "heads", "report.json",
    ]  # fmt: skip
    target = Target.load(str(world / "target"), dtype=torch.float32)
    heads = DraftHeads.from_pretrained(world / "out" / "heads", target)
    assert heads.config.kind == "eagle" and heads.config.lookahead == 3
    ids = torch.tensor([[70, 71, 72, 73]])
    plain = infer.generate(target.model, ids, None, max_new_tokens=6)
    assert infer.generate(target.model, ids, heads, max_new_tokens=6).sequences.tolist() == plain.sequences.tolist()
    curve = [json.loads(line) for line in (world / "out" / "curve.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in curve] == [(step, 10.0 - step) for step in range(1, 10)]
    report = json.loads((world / "out" / "report.json").read_text())
    assert report["optimizer"]["lr"] == fake_economize.calls["lr"] == 0.25
    assert report["tokens"] == sum(line["tokens"] for line in curve) and report["format"] == "economize"


def test_what_is_handed_over_is_this_runs_own(world: Path, in_process: list[list[str]]) -> None:
    """Two that run at once, with other shapes, share nothing but the target's states."""
    assert teach.main(words(world, *OFF)) == 0
    work = world / "work"
    assert not [path for path in work.glob("*") if not path.name.startswith("states-")]


def test_the_steps_are_our_own_trainings(world: Path, launch: object) -> None:
    """As the loop plans them, epoch after epoch."""
    from accelerate import Accelerator

    from train.assemble import load_conversations, make_heads
    from train.features import OnlineFeatures
    from train.loop import Trainer
    from train.progress import Reporter
    from train.ranks import Ranks
    from train.targets import load_target

    config, silent = load(world / "recipe.yaml"), Reporter(False)
    accelerator = Accelerator()
    target = load_target(config, accelerator)
    texts = load_conversations(config, "train", target, Ranks(), silent)
    heads = make_heads(config, target, texts, silent)
    source = OnlineFeatures(target, texts, heads.config.taps, torch.float32)
    trainer = Trainer(config, accelerator, heads, source, None, silent)
    own = [*trainer.plan(0), *trainer.plan(1), *trainer.plan(2)]
    assert len(trainer.plan(0)) < 9 < len(own) and steps_of(config, texts.lengths, 9) == own[:9]


def test_what_cannot_be_is_said_and_leaves_nothing(
    world: Path, in_process: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*more: str) -> str:
        assert teach.main(words(world, *more)) == 2
        assert not (world / "out").exists() and not list(world.glob(".out*"))
        return " ".join(capsys.readouterr().err.split())

    assert "--steps, --threads and --lr must be above 0" in said("--lr", "0")
    assert "--muon is an option of speculators, which economize lacks" in said("--muon")
    newer = ("--set", "heads.options.norm_output=true")
    assert "economize has no norm_output: train without, by --set heads.options.norm_output=false" in said(*newer)
    (world / "out").mkdir()
    (world / "out" / "mine").touch()
    assert teach.main(words(world)) == 2 and (world / "out" / "mine").exists()
