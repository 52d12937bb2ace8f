"""Training on a target with an adapter, and on a quantized one: heads learn from what it says as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from heads import DraftHeads, Target, TargetMismatch, derived
from heads.identity import hash_all
from infer import generate
from tests.data.toys import tokenizer
from tests.tiny import tiny_model
from tests.train.conftest import Launch
from tests.train.world import VOCAB, losses

IDS = torch.tensor([[1, 2, 3, 4]])
SHORT = ("--train.max_steps", 30, "--train.lr", "1e-2", "--eval.prompts", 2)


@pytest.fixture
def adapter(world: Path) -> Path:
    """An adapter whose B is random, not zero."""
    return save_adapter(world / "adapter", seed=3)


def save_adapter(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, lora_dropout=0.5)
    get_peft_model(tiny_model("llama", dtype=torch.float32, vocab=VOCAB), config).save_pretrained(str(folder))
    return folder


def decoded(folder: Path, target: Target | None = None) -> list[int]:
    heads = DraftHeads.from_pretrained(folder, target, dtype=torch.float32)
    plain = heads.target.model.generate(input_ids=IDS, max_new_tokens=16, do_sample=False)
    out = generate(heads.target, IDS, heads, max_new_tokens=16, do_sample=False).sequences
    assert torch.equal(out, plain)
    return out[0].tolist()


@pytest.mark.parametrize("features", ["cached", "online"])
def test_heads_of_an_adapted_target(features: str, world: Path, launch: Launch, adapter: Path) -> None:
    before = hash_all(load_file(adapter / "adapter_model.safetensors").items())
    report = launch("--target.adapter", adapter, "--data.features", features, *SHORT)
    values = losses(world / "run")
    assert sum(values[s] for s in range(26, 31)) < 0.9 * sum(values[s] for s in range(1, 6))
    folder = world / "run" / "heads"
    adapted = derived.load(str(world / "target"), dtype=torch.float32, adapter=str(adapter))
    base = Target.load(str(world / "target"), dtype=torch.float32)
    assert decoded(folder) == decoded(folder, adapted), "the adapter is found by the heads' record"
    plain = base.model.generate(input_ids=IDS, max_new_tokens=16, do_sample=False)[0].tolist()
    assert decoded(folder) != plain, "and it is on"
    with pytest.raises(TargetMismatch, match=r"adapter '\w{12}' \(.*adapter\) there, None here"):
        DraftHeads.from_pretrained(folder, base)
    assert report["heads"]["target"]["adapter_name"] == str(adapter)
    names = load_file(folder / "heads.safetensors").keys()
    assert not [name for name in names if "lora" in name or "base" in name or "embed" in name], "heads alone are saved"
    assert hash_all(load_file(adapter / "adapter_model.safetensors").items()) == before


def test_states_of_base_and_adapted_target_are_two_caches(world: Path, launch: Launch, adapter: Path) -> None:
    first: tuple[object, ...] = ("--train.max_steps", 1, "--eval.prompts", 0, "--eval.conversations", 0)
    launch(*first, "--output.folder", world / "base")
    launch(*first, "--target.adapter", adapter, "--output.folder", world / "adapted")
    assert losses(world / "base") != losses(world / "adapted")


@pytest.mark.parametrize("scheme", ["int8", "int4", "nf4"])
def test_heads_of_a_quantized_target(scheme: str, world: Path, launch: Launch) -> None:
    wide = world / "wide"  # 4-bit layers are packed by 64 inputs
    model = tiny_model("llama", dtype=torch.float32, vocab=VOCAB, hidden_size=64, intermediate_size=128, head_dim=16)
    model.save_pretrained(wide)
    tokenizer().save_pretrained(wide)
    report = launch("--target.name", wide, "--target.quantization", scheme, *SHORT)
    values = losses(world / "run")
    assert sum(values[s] for s in range(26, 31)) < 0.9 * sum(values[s] for s in range(1, 6))
    assert report["heads"]["target"]["quantizer"] == f"{scheme}/float32"
    folder = world / "run" / "heads"
    decoded(folder)
    with pytest.raises(TargetMismatch, match=f"quantizer '{scheme}/float32' there, None here"):
        DraftHeads.from_pretrained(folder, Target.load(str(wide), dtype=torch.float32))


def test_heads_of_an_adapter_on_a_quantized_target(world: Path, launch: Launch, adapter: Path) -> None:
    """Trained on both together, found again by the record; another adapter that took its place is not the target."""
    report = launch("--target.adapter", adapter, "--target.quantization", "int8", *SHORT[2:], "--train.max_steps", 3)
    recorded = report["heads"]["target"]
    assert recorded["quantizer"] == "int8/float32" and recorded["adapter_name"] == str(adapter)
    stored = json.loads((world / "run" / "heads" / "config.json").read_text())["target"]
    assert stored == recorded and len(stored["adapter"]) == 64
    folder = world / "run" / "heads"
    decoded(folder)
    quantized = derived.load(str(world / "target"), dtype=torch.float32, quantization="int8")
    with pytest.raises(TargetMismatch, match=r"adapter '\w{12}' \(.*adapter\) there, None here"):
        DraftHeads.from_pretrained(folder, quantized)
    save_adapter(adapter, seed=4)
    with pytest.raises(TargetMismatch, match=r"adapter '\w{12}' \(.*adapter\) there, '\w{12}' \(.*adapter\) here"):
        DraftHeads.from_pretrained(folder, dtype=torch.float32)
