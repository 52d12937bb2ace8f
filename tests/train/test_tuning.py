"""Training on from heads that there are: wholly, or by low-rank factors, on the same target or a fine-tuned one."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from heads import DraftHeads, Target, TargetMismatch
from heads.adapter import load_adapter
from infer import generate
from tests.tiny import tiny_model
from tests.train.conftest import Launch
from tests.train.test_loop import signal_at
from tests.train.world import VOCAB, losses
from train.interrupt import Interrupted
from train.settings import SettingsError

IDS = torch.tensor([[1, 2, 3, 4]])
QUIET = ("--eval.prompts", 0, "--eval.conversations", 0)
LORA = ("--heads.lora.rank", 4, "--heads.lora.alpha", 8, "--train.lr", "1e-2")


@pytest.fixture
def heads(world: Path, launch: Launch) -> Path:
    """Heads of the world's target, trained a little."""
    launch("--train.max_steps", 20, "--train.lr", "1e-2", *QUIET, "--output.folder", world / "first")
    return world / "first" / "heads"


def tuned_target(world: Path) -> Path:
    """The target, fine-tuned: its layers say something else."""
    model = tiny_model("llama", dtype=torch.float32, vocab=VOCAB)
    torch.manual_seed(5)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.add_(0.1 * torch.randn_like(layer.mlp.down_proj.weight))
    model.save_pretrained(world / "tuned")
    (world / "tuned" / "tokenizer.json").write_bytes((world / "target" / "tokenizer.json").read_bytes())
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        if (world / "target" / name).is_file():
            (world / "tuned" / name).write_bytes((world / "target" / name).read_bytes())
    return world / "tuned"


def test_training_goes_on_from_them(world: Path, launch: Launch, heads: Path) -> None:
    launch("--heads.init", heads, "--train.max_steps", 3, *QUIET)
    first, on = losses(world / "first"), losses(world / "run")
    assert on[1] < 0.95 * first[1]
    old, new = (load_file(folder / "heads.safetensors") for folder in (heads, world / "run" / "heads"))
    assert old.keys() == new.keys() and not torch.equal(old["fc.weight"], new["fc.weight"])
    assert torch.equal(old["target_ids"], new["target_ids"])


def test_how_heads_started_is_no_longer_asked_and_words_are_numbers(world: Path, launch: Launch, heads: Path) -> None:
    """A recipe for fresh heads goes on with ready ones, if it asks for heads like these."""
    config = json.loads((heads / "config.json").read_text())
    assert config["options"].pop("uniform_start") is True
    (heads / "config.json").write_text(json.dumps(config))  # as heads were written before there was the option
    start: tuple[object, ...] = ("--heads.init", heads, "--heads.options.uniform_start", "false", *QUIET)
    launch(*start, "--train.max_steps", 1)
    assert config["options"]["num_key_value_heads"] == 2
    with pytest.raises(SettingsError, match=r"num_key_value_heads is 'queries', but they have 2"):
        launch(*start, "--heads.options.num_key_value_heads", "queries")
    queries: tuple[object, ...] = ("--heads.options.num_key_value_heads", "queries", *QUIET, "--train.max_steps", 1)
    launch(*queries, "--output.folder", world / "full")
    launch(*queries, "--heads.init", world / "full" / "heads", "--output.folder", world / "on")


def test_factors_alone_are_trained_for_a_tuned_target(world: Path, launch: Launch, heads: Path) -> None:
    """A mismatch is named unless it is meant; what comes out is ordinary heads and an adapter, both of the new one."""
    there: tuple[object, ...] = ("--heads.init", heads, "--target.name", tuned_target(world), *LORA)
    with pytest.raises(TargetMismatch, match=r"same shape but other weights.*set heads\.allow_mismatch to true"):
        launch(*there, *QUIET)
    launch(*there, "--heads.allow_mismatch", "true", "--train.max_steps", 25, *QUIET)
    values = losses(world / "run")
    assert sum(values[s] for s in range(21, 26)) < sum(values[s] for s in range(1, 6))
    target = Target.load(str(world / "tuned"), dtype=torch.float32)
    merged = DraftHeads.from_pretrained(world / "run" / "heads", target)
    assert merged.config.lora is None
    old, new = load_file(heads / "heads.safetensors"), load_file(world / "run" / "heads" / "heads.safetensors")
    assert old.keys() == new.keys()
    assert torch.equal(old["norm.weight"], new["norm.weight"]), "what has no factors stays"
    assert not torch.equal(old["layer.q_proj.weight"], new["layer.q_proj.weight"])
    adapter = load_adapter(world / "run" / "adapter", target)
    for name, tensor in merged.state_dict().items():
        if name in ("norm.weight", "target_ids"):
            assert torch.equal(tensor, adapter.state_dict()[name])
    out = generate(target, IDS, merged, max_new_tokens=12, do_sample=False).sequences
    assert torch.equal(out, target.model.generate(input_ids=IDS, max_new_tokens=12, do_sample=False))
    size = (world / "run" / "adapter" / "adapter.safetensors").stat().st_size
    assert size < (world / "run" / "heads" / "heads.safetensors").stat().st_size / 2


def test_a_stopped_adaptation_goes_on_as_if_it_had_not(
    world: Path, launch: Launch, heads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short: tuple[object, ...] = ("--heads.init", heads, *LORA, "--train.max_steps", 4, *QUIET)
    launch(*short, "--output.folder", world / "whole")
    with monkeypatch.context() as patch:
        signal_at(patch, 2, signal.SIGTERM)
        with pytest.raises(Interrupted):
            launch(*short)
    launch(*short)
    assert losses(world / "run") == losses(world / "whole")
    for name in ("heads/heads.safetensors", "adapter/adapter.safetensors"):
        once, twice = (load_file(world / run / name) for run in ("whole", "run"))
        assert once.keys() == twice.keys() and all(torch.equal(once[key], twice[key]) for key in once)


def test_a_recipe_that_asks_for_other_heads_is_refused(world: Path, launch: Launch, heads: Path) -> None:
    with pytest.raises(SettingsError, match=r"heads\.kind is medusa, but they have eagle; heads\.lookahead is 2"):
        launch("--heads.init", heads, "--heads.kind", "medusa", "--heads.lookahead", 2, *QUIET)
    with pytest.raises(SettingsError, match=r"heads\.lora needs heads\.init"):
        launch("--heads.lora.rank", 4, *QUIET)
    with pytest.raises(SettingsError, match=r"heads\.init is .*first/heads, which this run would write over"):
        launch("--heads.init", heads, "--output.folder", heads.parent, *QUIET)
