"""Targets with an adapter or quantized weights: who they are, that heads find them again, that text stays theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, TorchAoConfig

import infer
from heads import DraftHeads, build, derived, make_config
from heads.derived import SCHEMES, quantization_config, recorded
from heads.grow import Budget
from heads.identity import TargetIdentity
from heads.target import Target, TargetMismatch
from tests.heads.small import random_ids, relative
from tests.infer.fakes import Oracle, RandomTree
from tests.tiny import tiny_model

PROMPT = random_ids(12, seed=4)
NEW = 24
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
ADAPTED = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target on disk, and two adapters for it whose B is random."""
    folder = tmp_path_factory.mktemp("derived")
    tiny_model("llama", dtype=torch.float32, **WIDE).save_pretrained(folder / "target")
    for seed in (1, 2):
        torch.manual_seed(seed)
        plain = tiny_model("llama", dtype=torch.float32, **WIDE)
        config = LoraConfig(r=2, lora_alpha=4, target_modules=ADAPTED, init_lora_weights=False, lora_dropout=0.5)
        get_peft_model(plain, config).save_pretrained(str(folder / f"adapter{seed}"))
    return folder


def load(base: Path, dtype: torch.dtype = torch.float32, **how: Any) -> Target:
    return derived.load(str(base / "target"), dtype=dtype, **how)


def greedy(target: Target) -> list[int]:
    return target.model.generate(input_ids=PROMPT, max_new_tokens=NEW, do_sample=False)[0].tolist()


def heads_for(target: Target) -> DraftHeads:
    made = build(make_config("medusa", target, lookahead=3), target).to(target.dtype)
    made.initialize()
    return made.eval()


def exact(target: Target, text: list[int]) -> None:
    """Whoever drafts: oracle chains, wrong trees, heads, the text itself."""
    for draft in (Oracle(text), RandomTree(text), heads_for(target), "lookup:1"):
        budget = Budget(rows=9, depth=3, width=3) if isinstance(draft, RandomTree) else Budget.chain(3)
        out = infer.generate(target, PROMPT, draft, budget=budget, max_new_tokens=NEW, do_sample=False)
        assert out.sequences[0].tolist() == text, draft


# adapters


def test_an_adapter_by_name_is_on_recorded_and_found_again(base: Path, tmp_path: Path) -> None:
    plain, target = load(base), load(base, adapter=str(base / "adapter1"))
    text = greedy(target)
    assert text != greedy(plain)
    exact(target, text)
    identity = target.identity()
    assert identity.adapter and identity.adapter_name == str(base / "adapter1")
    assert identity.weights == plain.identity().weights
    heads_for(target).save_pretrained(tmp_path)
    found = DraftHeads.from_pretrained(tmp_path, dtype=torch.float32)
    assert greedy(found.target) == text
    assert infer.generate(str(tmp_path), PROMPT, max_new_tokens=4, do_sample=False).sequences.shape == (1, 16)
    with pytest.raises(TargetMismatch, match=r"adapter '\w{12}' \(.*adapter1\) there, None here"):
        DraftHeads.from_pretrained(tmp_path, plain)
    with pytest.raises(TargetMismatch, match=r"adapter '\w{12}' \(.*adapter1\) there, '\w{12}' \(.*adapter2\) here"):
        DraftHeads.from_pretrained(tmp_path, load(base, adapter=str(base / "adapter2")))


def test_a_record_without_an_adapters_name_says_so(base: Path) -> None:
    target = Target(load(base, adapter=str(base / "adapter1")).model, name="x")
    stored = target.identity().to_dict()
    assert "adapter_name" not in stored and stored["adapter"]
    with pytest.raises(ValueError, match="with an adapter that was not loaded by name: load both yourself"):
        recorded(TargetIdentity.from_dict(stored), None)
    # records of plain targets stand as they always did
    keys = {"name", "revision", "fields", "weights", "quantizer", "adapter"}
    assert load(base).identity().to_dict().keys() == keys
    assert recorded(load(base).identity(), None).dtype == torch.bfloat16


def test_adapters_that_cannot_be_a_targets_are_refused(base: Path, tmp_path: Path) -> None:
    model = tiny_model("llama", dtype=torch.float32, **WIDE)
    other = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    get_peft_model(model, other).save_pretrained(str(tmp_path / "ia3"))
    with pytest.raises(ValueError, match=r"ia3 is a .*IA3 adapter: a target's adapter is a LoRA"):
        load(base, adapter=str(tmp_path / "ia3"))
    saved = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    get_peft_model(tiny_model("llama", dtype=torch.float32, **WIDE), saved).save_pretrained(str(tmp_path / "saves"))
    with pytest.raises(ValueError, match="saves replaces lm_head of its base: merge it"):
        load(base, adapter=str(tmp_path / "saves"))
    narrow = get_peft_model(tiny_model("llama", dtype=torch.float32), LoraConfig(r=2, target_modules=["q_proj"]))
    narrow.save_pretrained(str(tmp_path / "narrow"))
    with pytest.raises(ValueError, match="narrow does not fit the target"):
        load(base, adapter=str(tmp_path / "narrow"))
    with pytest.raises((OSError, ValueError), match="nowhere"):
        load(base, adapter=str(tmp_path / "nowhere"))


# quantized weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["int8", "int4", "nf4"])
def test_a_quantized_target_is_decoded_exactly_and_found_again(
    scheme: str, dtype: torch.dtype, base: Path, tmp_path: Path
) -> None:
    plain, target = load(base, dtype), load(base, dtype, quantization=scheme)
    ids = random_ids(12)
    error = relative(target.forward(ids).logits, plain.forward(ids).logits)
    assert 1e-3 < error < {"int8": 0.6, "int4": 1.5, "nf4": 1.5}[scheme]  # random weights pass rounding on undamped
    assert target.dtype == dtype and target.vocab_size == 64
    target.self_check()
    text = greedy(target)
    if dtype == torch.float32:
        exact(target, text)
    identity = target.identity()
    assert identity.quantizer == f"{scheme}/{str(dtype).removeprefix('torch.')}"
    assert identity.weights == load(base, dtype, quantization=scheme).identity().weights
    heads_for(target).save_pretrained(tmp_path)
    found = DraftHeads.from_pretrained(tmp_path)
    assert found.target.identity() == identity and greedy(found.target) == text
    assert found.target.weights_hash() == target.weights_hash() != plain.weights_hash()
    with pytest.raises(TargetMismatch, match=f"quantizer '{scheme}/.*' there, None here"):
        DraftHeads.from_pretrained(tmp_path, plain)


def test_quantized_in_another_dtype_it_is_still_the_target(base: Path) -> None:
    """Its codes are not quite the same, so what the quantizer left alone decides."""
    half, single = (load(base, dtype, quantization="int8").identity() for dtype in (torch.bfloat16, torch.float32))
    assert half.weights != single.weights and half.weights.split("-")[0] == single.weights.split("-")[0]
    assert half.differences(single) == []
    assert half.differences(load(base, quantization="int4").identity()) == [
        "quantizer 'int8/bfloat16' there, 'int4/float32' here"
    ]


def test_other_weights_under_the_same_quantizer_are_another_target(base: Path, tmp_path: Path) -> None:
    model = tiny_model("llama", dtype=torch.float32, **WIDE)
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[0, 0] += 1  # what stays plain is the same
    model.save_pretrained(tmp_path)
    one, other = (
        load(base, quantization="int8"),
        derived.load(str(tmp_path), dtype=torch.float32, quantization="int8"),
    )
    (piece,) = one.identity().differences(other.identity())
    assert "same shape but other weights" in piece


def test_a_target_that_a_user_quantized_is_told_alike(base: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig

    def own(config: Any) -> Target:
        quantizing = TorchAoConfig(config)
        model = AutoModelForCausalLM.from_pretrained(
            base / "target", dtype=torch.float32, quantization_config=quantizing
        )
        return Target(model, name="own")

    assert load(base, quantization="int8").identity().differences(own(Int8WeightOnlyConfig()).identity()) == []
    assert own(IntxWeightOnlyConfig(weight_dtype=torch.int4)).identity().quantizer == (  # type: ignore[attr-defined]
        "torchao IntxWeightOnlyConfig/float32"
    )


class Int8(nn.Module):
    """A linear layer of which nobody was told."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        scale = plain.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((plain.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)  # type: ignore[operator]


def test_a_quantizer_without_a_name_goes_by_its_layers() -> None:
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.mlp.down_proj = Int8(layer.mlp.down_proj)
    identity = Target(model).identity()
    assert identity.quantizer == "Int8" and "-" in identity.weights
    assert Target(model).weights_hash() == Target(model).weights_hash()


def test_an_adapter_on_a_quantized_target(base: Path, tmp_path: Path) -> None:
    target = load(base, adapter=str(base / "adapter1"), quantization="int8")
    text = greedy(target)
    assert text != greedy(load(base, quantization="int8"))
    exact(target, text)
    heads_for(target).save_pretrained(tmp_path)
    assert greedy(DraftHeads.from_pretrained(tmp_path).target) == text


def test_what_does_not_go_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, base: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no quantization 'int5' \(int8: 8 bit, a scale a row; int4: "):
        quantization_config("int5", torch.float32)
    with pytest.raises(
        ValueError, match=r"int8 weights compute in bfloat16, float16 or float32, not in torch\.float64"
    ):
        load(base, torch.float64, quantization="int8")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for scheme, each in SCHEMES.items():
        with pytest.raises(
            ValueError, match=rf"{scheme} weights need the package {each.package}: pip install -e '\.\["
        ):
            quantization_config(scheme, torch.bfloat16)


@pytest.mark.parametrize("scheme", ["int8", "int4", "nf4"])
def test_asking_what_the_weights_are_leaves_them_as_they_are(scheme: str, base: Path) -> None:
    target = load(base, quantization=scheme)
    ids = random_ids(12)
    said, weights = target.forward(ids).logits, target.weights_hash()
    assert torch.equal(target.forward(ids).logits, said) and target.weights_hash() == weights


@pytest.mark.parametrize(
    ("inputs", "outputs", "packs", "said"),
    [(64, 32, True, None), (32, 64, True, "0 has 32 and 64"), (64, 48, True, "0 has 64 and 48"), (32, 48, False, None)],
)
def test_four_bit_layers_that_could_not_be_packed_are_found(
    inputs: int, outputs: int, packs: bool, said: str | None
) -> None:
    """bitsandbytes would end the first pass with an assertion about its own blocks, on some processors alone."""

    class Linear4bit(nn.Linear):
        support_avx512bf16_for_cpu = packs

    assert derived.unpackable(nn.Sequential(Linear4bit(inputs, outputs))) == said


def test_four_bit_layers_are_packed_before_anything_is_asked_of_them() -> None:
    """Else the weights after a first pass would not be those before it, and the target another one."""

    class Linear4bit(nn.Linear):
        support_avx512bf16_for_cpu = True

        def forward(self, x: Tensor) -> Tensor:
            if not x.requires_grad:
                self.weight.data = self.weight.data.bfloat16().float()
            return super().forward(x)

    layer = Linear4bit(64, 32)
    before = layer.weight.clone()
    derived.settle(nn.Sequential(layer))
    settled = layer.weight.clone()
    layer(torch.ones(1, 64))
    assert torch.equal(layer.weight, settled) and not torch.equal(settled, before)


def test_a_target_that_could_not_be_packed_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derived, "unpackable", lambda model: "model.layers.0.mlp.up_proj has 48 and 96")
    with pytest.raises(ValueError, match=r"int8 weights of .*target cannot be used .* by 64 inputs and 32 outputs"):
        load(base, quantization="int8")


def test_outliers_over_the_whole_pass_are_refused() -> None:
    """bitsandbytes' int8 layers choose columns by all rows of a pass."""

    class Linear8bitLt(nn.Linear):
        def __init__(self) -> None:
            super().__init__(64, 32, bias=False)
            self.state = type("State", (), {"threshold": 6.0})()

    model = tiny_model("llama")
    model.model.layers[1].mlp.down_proj = Linear8bitLt()
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.down_proj of LlamaForCausalLM is quantized with"):
        Target(model)
    model.model.layers[1].mlp.down_proj.state.threshold = 0.0
    Target(model)
