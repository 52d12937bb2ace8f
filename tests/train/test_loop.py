"""Whole runs in this process: exact accumulation, exact step counts, what is left behind, going on after a stop."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from heads import DraftHeads, Target
from heads.kinds import KINDS
from infer import generate
from tests.data.toys import chat, write_jsonl
from tests.tiny import tiny_model
from tests.train.conftest import Launch
from tests.train.world import VOCAB, log_of, losses
from train.interrupt import Interrupted
from train.loop import Trainer
from train.losses import TERMS
from train.settings import SECTIONS, fields_of
from train.step import Stepper

DOUBLE = ("--target.dtype", "float64", "--data.feature_dtype", "float64")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "heads" / "heads.safetensors")


def test_a_run_leaves_heads_that_decode_and_a_report(world: Path, launch: Launch) -> None:
    report = launch("--train.epochs", 2, "--eval.every", 3)
    folder = world / "run"
    assert json.loads((folder / "report.json").read_text()) == json.loads(json.dumps(report))
    assert report["steps"] == 6 and report["decoded"]["prompts"] == 3
    assert report["heldout"]["heldout/loss"] > 0
    assert len(report["decoded"]["acceptance"]) == 3
    names = {
        "train/loss",
        "train/lr",
        "train/tokens_per_second",
        "train/soft_ce/1",
        "train/acceptance/3",
        "train/overlap/2",
    }
    assert names <= log_of(folder)[0].keys()
    heads = DraftHeads.from_pretrained(folder / "heads", Target.load(str(world / "target"), dtype=torch.float32))
    ids = torch.tensor([[1, 2, 3, 4]])
    plain = heads.target.model.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(generate(heads.target.model, ids, heads, max_new_tokens=12, do_sample=False).sequences, plain)


def test_loss_falls_and_only_heads_learn(world: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    original = Trainer.run

    def watched(self: Trainer) -> None:
        seen["trainer"], seen["before"] = self, self.heads.target.weights_hash()
        original(self)

    monkeypatch.setattr(Trainer, "run", watched)
    launch("--train.max_steps", 40, "--train.lr", "1e-2", "--eval.prompts", 0)
    trainer: Trainer = seen["trainer"]
    target = trainer.heads.target
    assert target.weights_hash() == seen["before"] == trainer.heads.target.weights_hash()
    assert all(p.grad is None and not p.requires_grad for p in target.model.parameters())
    assert not {id(p) for p in target.model.parameters()} & {id(p) for p in trainer.engine.model.parameters()}
    values = losses(world / "run")
    assert sum(values[s] for s in range(36, 41)) < 0.9 * sum(values[s] for s in range(1, 6))
    assert all(0 <= value <= 1 for line in log_of(world / "run") for key, value in line.items() if "acceptance" in key)


def test_accumulation_is_exact(world: Path, launch: Launch) -> None:
    """One pass a step or four or more of unequal sizes: the same losses and weights."""
    launch(*DOUBLE, "--train.batch_tokens", 320, "--train.micro_tokens", 100000, "--output.folder", world / "one")
    launch(*DOUBLE, "--train.batch_tokens", 320, "--train.micro_tokens", 90, "--output.folder", world / "many")
    one, many = losses(world / "one"), losses(world / "many")
    assert one.keys() == many.keys() == set(range(1, 7))
    assert [many[s] for s in one] == pytest.approx(list(one.values()), rel=1e-9)
    for name, value in weights(world / "one").items():
        torch.testing.assert_close(weights(world / "many")[name], value, rtol=1e-6, atol=1e-9)


def test_cached_and_online_train_alike(world: Path, launch: Launch) -> None:
    """bf16 storage either way: the same losses."""
    settings = ("--target.dtype", "float64", "--data.feature_dtype", "bfloat16", "--eval.prompts", 0)
    launch(*settings, "--output.folder", world / "cached")
    launch(*settings, "--data.features", "online", "--output.folder", world / "online")
    assert list(losses(world / "online").values()) == pytest.approx(list(losses(world / "cached").values()), rel=1e-3)
    assert (world / "cache").is_dir()


def test_max_steps_are_exact_and_the_last_is_saved_once(world: Path, launch: Launch) -> None:
    """Two steps where two are asked for; five with a save every four leave the fifth."""
    launch("--train.max_steps", 2, "--train.epochs", 3, "--output.folder", world / "two")
    assert list(losses(world / "two")) == [1, 2]
    saved = []
    for keep in (1, 3):
        folder = world / f"keep{keep}"
        launch("--train.max_steps", 5, "--train.save_every", 4, "--output.keep", keep, "--eval.prompts", 0,
               "--eval.conversations", 0, "--output.folder", folder)  # fmt: skip
        saved.append(sorted(path.name for path in (folder / "checkpoints").iterdir()))
    assert saved == [["step-00000005"], ["step-00000004", "step-00000005"]]


def test_epochs_set_the_steps_where_no_maximum_does(world: Path, launch: Launch) -> None:
    report = launch("--train.max_steps", "null", "--train.epochs", 2, "--eval.prompts", 0)
    assert report["steps"] == len(losses(world / "run")) > 6


def signal_at(monkeypatch: pytest.MonkeyPatch, step: int, number: int) -> None:
    """Send this process a signal once ``step`` steps are done."""
    original = Trainer._after_step

    def after(self: Trainer, *arguments: Any) -> None:
        original(self, *arguments)
        if self.progress.step == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Trainer, "_after_step", after)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_goes_on_as_if_it_had_not(
    world: Path, launch: Launch, number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Six steps at once, and three, a signal, three: the same; the log has each step once."""
    launch("--output.folder", world / "whole")
    with monkeypatch.context() as patch:
        signal_at(patch, 3, number)
        with pytest.raises(
            Interrupted, match=r"after step 3; checkpoint written to .*step-00000003.*Run the same"
        ) as stop:
            launch()
    assert stop.value.exit_status == 128 + number
    assert not (world / "run" / "heads").exists()
    launch()
    assert "resumed: step 3 of 6" in capsys.readouterr().err
    for name in ("train/loss", "train/lr", "train/acceptance/1"):
        whole, parts = ([line.get(name) for line in log_of(world / run)] for run in ("whole", "run"))
        assert parts == whole
    for name, value in weights(world / "whole").items():
        assert torch.equal(weights(world / "run")[name], value), name


def test_a_finished_run_is_not_repeated_unless_its_data_changed(
    world: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = launch("--eval.prompts", 0)
    with monkeypatch.context() as patch:
        patch.setattr("train.train_heads.make_heads", lambda *_: pytest.fail("trained again"))
        assert launch("--eval.prompts", 0) == json.loads(json.dumps(first))
    lines = (world / "train.jsonl").read_text().splitlines(keepends=True)
    (world / "train.jsonl").write_text("".join(lines[1:]))
    with pytest.raises(ValueError, match=r"other settings \(data\.content "):
        launch("--eval.prompts", 0)


def test_a_run_can_be_made_longer_but_not_another(world: Path, launch: Launch) -> None:
    launch("--eval.prompts", 0)
    with pytest.raises(ValueError, match=r"other settings \(train\.lr 0\.003 → 0\.5\): set them back"):
        launch("--train.lr", 0.5)
    with pytest.raises(ValueError, match=r"has a checkpoint and output\.resume is false"):
        launch("--output.resume", "false", "--train.max_steps", 9)
    report = launch("--train.max_steps", 8, "--train.log_every", 2, "--eval.prompts", 0)
    assert report["steps"] == 8


def test_the_best_by_decoding_is_kept_and_can_be_exported(
    world: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([1.5, 2.0, 1.2])
    monkeypatch.setattr("train.evaluation.Evaluation.score", property(lambda self: next(scores)))
    report = launch("--eval.every", 2, "--output.export", "best", "--output.keep", 1)
    assert report["best"] == {"step": 4, "tokens_per_round": 2.0}
    names = sorted(path.name for path in (world / "run" / "checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000006"]
    best = weights(world / "run" / "checkpoints" / "step-00000004")
    assert all(torch.equal(value, best[name]) for name, value in weights(world / "run").items())


MODES = {
    f"{section}.{name}": item.metadata["choices"]
    for section, kind in SECTIONS.items()
    for name, (_, item) in fields_of(kind).items()
    # these go with some dtypes (test_derived.py), with several processes (test_engines.py), or on GPUs only
    if item.metadata["choices"] and name not in ("quantization", "placement", "engine", "attention", "kernels")
}
BOOLEANS = [f"{section}.{name}" for section, kind in SECTIONS.items() for name, (wanted, _) in fields_of(kind).items()
            if wanted is bool]  # fmt: skip


@pytest.mark.parametrize("turn", range(max(map(len, MODES.values()))))
def test_every_mode_takes_two_steps(world: Path, launch: Launch, turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the n-th run every mode has its n-th value, and each boolean is on in one run and off in the next; what was
    asked for is what config.yaml says."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    wanted: dict[str, Any] = {name: choices[turn % len(choices)] for name, choices in MODES.items()}
    wanted |= {name: turn % 2 == 0 for name in BOOLEANS}
    wanted["heads.kind"] = list(KINDS)[turn % len(KINDS)]
    settings = [word for name, value in wanted.items() for word in (f"--{name}", str(value).lower())]
    terms = [f"--train.loss.{list(TERMS)[turn % len(TERMS)]}", 0.5]
    taps = {"medusa": "4", "eagle1": "4"}.get(wanted["heads.kind"], "1,2,3")
    report = launch(*settings, *terms, "--heads.taps", taps,
                    "--train.max_steps", 2, "--eval.every", 1)  # fmt: skip
    assert report["steps"] == 2 and report["decoded"]["prompts"] == 3
    effective = yaml.safe_load((world / "run" / "config.yaml").read_text())
    for name, value in wanted.items():
        section, _, key = name.partition(".")
        assert effective[section][key] == value, name


def test_the_rate_follows_optimizer_steps(world: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight conversations, one a micro-batch, four a step, twice: four steps, and the rate falls a quarter at each."""
    rows = [{"messages": chat("abcdef", "gfedcb")} for _ in range(8)]
    write_jsonl(world / "train.jsonl", rows)
    seen: list[int] = []
    original = Stepper.batch

    def watched(self: Stepper, source: Any, indices: tuple[int, ...]) -> Any:
        seen.append(len(indices))
        return original(self, source, indices)

    monkeypatch.setattr(Stepper, "batch", watched)
    length = 16  # [U] and [A], six letters each, their two ends
    report = launch("--train.batch_tokens", 4 * length, "--train.micro_tokens", length, "--train.epochs", 2,
                    "--train.max_steps", "null", "--train.schedule", "linear", "--train.lr", "1e-3",
                    "--eval.prompts", 0, "--eval.conversations", 0)  # fmt: skip
    assert report["steps"] == 4 and report["data"]["tokens"] == 8 * length
    assert seen == [1] * 16
    rates = [line["train/lr"] for line in log_of(world / "run")]
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4], rel=1e-12)


def test_prepared_folders_and_relative_paths(world: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prepared folder with both splits serves both parts; the run folder is made where it is asked for."""
    from data.prepare import prepare
    from heads import Target as _Target

    tokenizer = _Target.load(str(world / "target")).tokenizer()
    prepare([world / "train.jsonl"], tokenizer, world / "both", heldout=6)
    monkeypatch.chdir(world)
    report = launch("--data.train", "both", "--data.heldout", "both", "--output.folder", "a/b/new")
    assert report["data"]["conversations"] == 18
    assert {path.name for path in (world / "a" / "b" / "new").iterdir()} == {
        "heads", "checkpoints", "config.yaml", "run.json", "report.json", "log.jsonl",
    }  # fmt: skip


def test_several_files_are_one_training_set(world: Path, launch: Launch) -> None:
    lines = (world / "train.jsonl").read_text().splitlines(keepends=True)
    (world / "a.jsonl").write_text("".join(lines[:5]))
    (world / "b.jsonl").write_text("".join(lines[5:12]))
    report = launch("--data.train", f"{world / 'a.jsonl'} + {world / 'b.jsonl'}", "--train.max_steps", 1)
    assert report["data"]["conversations"] == 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data.train", "nowhere.jsonl"], r"data\.train is nowhere\.jsonl, and nowhere\.jsonl does not exist"),
        (["--heads.kind", "eagel"], "eagle"),
        (["--heads.options.no_such_option", "1"], "no_such_option"),
        (["--heads.draft_vocab_size", "100000"], "draft_vocab_size"),
        (["--train.loss.lk", "-1"], r"train\.loss\.lk is -1"),
    ],
)
def test_what_cannot_be_trained_is_named(launch: Launch, world: Path, arguments: list[str], message: str) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        launch(*arguments)
    assert not (world / "run" / "heads").exists()


def test_a_file_without_a_usable_row(world: Path, launch: Launch) -> None:
    (world / "train.jsonl").write_text('{"messages": []}\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    with pytest.raises(ValueError, match="no usable row"):
        launch()
    assert not (world / "run" / "prepared" / "train").exists()


def test_the_vocabulary_of_the_world() -> None:
    """The tiny target has a row for every token of the toy tokenizer."""
    assert tiny_model("llama", vocab=VOCAB).get_output_embeddings().weight.shape[0] == VOCAB
