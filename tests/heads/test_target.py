"""Targets of every family: what is read of them is what the model computes, and who they are is told apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import CohereConfig, DynamicCache, GraniteConfig, PreTrainedModel

from heads.draft import Draft
from heads.identity import TargetIdentity
from heads.target import Target, TargetMismatch
from tests.heads.small import random_ids, relative, small_target
from tests.tiny import FAMILIES, Family, tiny_model

TREE = Draft((7, 8, 9, 10, 11, 12), (-1, -1, 0, 0, 1, 2), (None,) * 6)
SLIDING: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": 6}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    "gemma2": ("gemma2", {"sliding_window": 6}),
    "gemma3": ("gemma3", {"sliding_window": 6}),
    "gemma3 mixed": (
        "gemma3",
        {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "phi3": ("phi3", {"sliding_window": 6}),
}


@pytest.fixture(params=sorted(FAMILIES))
def target(request: pytest.FixtureRequest) -> Target:
    return small_target(request.param)


# what is read


def test_logits_follow_from_the_hidden_state(target: Target) -> None:
    ids = random_ids(20, rows=2)
    out = target.forward(ids, hidden=True)
    assert out.hidden is not None and out.hidden.shape == (2, 20, 32) and out.logits.shape == (2, 20, 64)
    theirs = target.model(ids).logits
    assert relative(out.logits, theirs) == 0
    assert relative(target.project(out.hidden), theirs) <= 1e-12
    # cases.md B10: the state that heads are trained on is the one after the final norm
    assert torch.equal(target.project(out.hidden).argmax(-1), theirs.argmax(-1))
    rows = torch.tensor([1, 3, 60])
    assert relative(target.project_rows(out.hidden, rows), theirs[..., rows]) <= 1e-12
    assert torch.equal(target.project_rows(out.hidden, None), target.project(out.hidden))
    target.self_check()


def test_taps_are_the_hidden_states_of_transformers(target: Target) -> None:
    ids = random_ids(9)
    states = target.model(ids, output_hidden_states=True).hidden_states
    out = target.forward(ids, taps=(3, 1, 4), hidden=True)
    assert out.taps is not None and out.taps.shape == (1, 9, 96)
    assert torch.equal(out.taps, torch.cat([states[3], states[1], states[4]], -1))
    assert out.hidden is not None and torch.equal(out.hidden, states[-1])
    plain = target.forward(ids, logits_to_keep=2)
    assert plain.taps is None and plain.hidden is None and plain.logits.shape == (1, 2, 64)
    assert torch.equal(target.forward(ids, taps=(0,)).taps, states[0])


def test_sizes_and_layers(target: Target) -> None:
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (4, 32, 64)
    assert len(target.layers) == 4 and len(target.layer_types) == 4
    assert target.max_positions == 512 and target.dtype == torch.float64
    assert not target.model.training
    assert target.embed(torch.tensor([[1, 2]])).shape == (1, 2, 32)


def check_tree(target: Target, prompt: int) -> None:
    """One pass over a tree on a cache gives each path what a plain pass over the whole text gives."""
    ids = random_ids(prompt + 1, seed=3)
    cache = DynamicCache()  # without the configuration: keeps all keys, windows are cut out of the mask
    if prompt:
        target.forward(ids[:, :-1], cache=cache, mask=torch.ones(prompt, prompt).tril().bool()[None, None])
    # eager attention takes its softmax in float32 whatever the model's dtype is
    bound = 1e-6 if target.config._attn_implementation == "eager" else 1e-10
    n = len(TREE) + 1
    mask = torch.cat([torch.ones(n, prompt, dtype=torch.bool), TREE.visibility()], 1)[None, None]
    rows = torch.tensor([[int(ids[0, -1]), *TREE.tokens]])
    positions = torch.tensor([[prompt, *(prompt + depth for depth in TREE.depths)]])
    out = target.forward(rows, cache=cache, mask=mask, positions=positions, taps=(2,), hidden=True)
    assert out.taps is not None and out.hidden is not None
    for node in range(-1, len(TREE)):
        text = torch.cat([ids, torch.tensor([[TREE.tokens[i] for i in TREE.path(node)]], dtype=torch.long)], 1)
        alone = target.forward(text, taps=(2,), hidden=True)
        assert alone.taps is not None and alone.hidden is not None
        assert relative(out.logits[:, node + 1], alone.logits[:, -1]) <= bound
        assert relative(out.taps[:, node + 1], alone.taps[:, -1]) <= bound
        assert relative(out.hidden[:, node + 1], alone.hidden[:, -1]) <= bound


@pytest.mark.parametrize("prompt", [0, 1, 20])
def test_a_tree_pass_equals_a_pass_along_each_path(target: Target, prompt: int) -> None:
    check_tree(target, prompt)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("prompt", [4, 19])
@pytest.mark.parametrize("case", SLIDING)
def test_trees_under_sliding_windows(case: str, prompt: int, implementation: str) -> None:
    family, settings = SLIDING[case]
    if family == "gemma2":
        implementation = "eager"  # transformers offers it no other
    target = Target(tiny_model(family, attn_implementation=implementation, **settings))
    assert "sliding_attention" in target.layer_types and target.sliding_window == 6
    check_tree(target, prompt)


def test_the_window_matters_here() -> None:
    """The check above would see a window that is ignored, or off by one."""
    for window in (5, 7, 100):
        target = Target(tiny_model("mistral", sliding_window=6))
        target.sliding_window = window
        with pytest.raises(AssertionError):
            check_tree(target, 19)


def test_padding_is_left_to_the_model() -> None:
    target = small_target()
    ids = random_ids(8)
    padded = torch.cat([ids, torch.zeros(1, 3, dtype=torch.long)], 1)
    mask = torch.tensor([[True] * 8 + [False] * 3])
    assert relative(target.forward(padded, mask=mask).logits[:, :8], target.forward(ids).logits) <= 1e-12


def test_attention_without_masks_and_layers_without_trees_are_refused() -> None:
    target = Target(tiny_model("llama"))
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    target.model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match=r"flash_attention_2.*attn_implementation='sdpa' or 'eager'"):
        target.forward(random_ids(2), mask=mask)
    target = Target(tiny_model("llama"))
    target.layer_types = ("full_attention", "linear_attention", "full_attention", "full_attention")
    with pytest.raises(ValueError, match="linear_attention take no tree mask"):
        target.forward(random_ids(2), mask=mask)


# soft-cap and scale (cases.md H5)


def scaled(config: Any, **settings: Any) -> PreTrainedModel:
    """A tiny model of a family that tests/tiny.py has no row for."""
    FAMILIES["scaled"] = Family(config, FAMILIES["llama"].names, {})
    try:
        return tiny_model("scaled", **settings)
    finally:
        del FAMILIES["scaled"]


TRANSFORMED = {
    "soft-cap": lambda: tiny_model("gemma2", final_logit_softcapping=5.0),
    "multiplied": lambda: scaled(CohereConfig, logit_scale=0.125),
    "divided": lambda: scaled(GraniteConfig, logits_scaling=8.0),
}


@pytest.mark.parametrize("case", TRANSFORMED)
def test_soft_cap_and_scale_are_part_of_the_logits(case: str) -> None:
    target = Target(TRANSFORMED[case]())
    ids = random_ids(30)
    out = target.forward(ids, hidden=True)
    assert out.hidden is not None
    raw = target.output(out.hidden)
    assert relative(raw, out.logits) > 0.1, "it does something here"
    assert torch.equal(raw.argmax(-1), out.logits.argmax(-1)), "which the arg-max cannot tell"
    assert relative(target.project(out.hidden), out.logits) <= 1e-12
    rows = torch.tensor([0, 5, 63])
    assert relative(target.project_rows(out.hidden, rows), out.logits[..., rows]) <= 1e-12
    target.self_check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.5, 1.02])
def test_a_model_that_changes_its_logits_in_an_unknown_way_is_refused(scale: float, dtype: torch.dtype) -> None:
    class Odd(type(tiny_model("llama"))):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * scale
            return out

    model = tiny_model("llama", dtype=dtype)
    model.__class__ = Odd
    with pytest.raises(ValueError, match=r"logits of Odd do not follow from its last hidden state.*not supported"):
        Target(model).self_check()


def test_a_wide_soft_cap_of_an_unknown_name_is_seen() -> None:
    """Its tanh moves these logits by a few parts in a thousand only."""
    model = tiny_model("gemma2", dtype=torch.float32, final_logit_softcapping=200.0)
    target = Target(model)
    target.self_check()
    target.transform = lambda logits: logits  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="do not follow"):
        target.self_check()


def test_models_without_the_needed_parts_are_refused() -> None:
    model = tiny_model("llama")
    model.get_output_embeddings = lambda: None
    with pytest.raises(ValueError, match="LlamaForCausalLM lacks an output matrix"):
        Target(model)
    model = tiny_model("llama")
    model.model.extra = torch.nn.ModuleList(torch.nn.Identity() for _ in range(4))
    with pytest.raises(ValueError, match="2 lists of 4 layers where one is expected"):
        Target(model)


# who it is


def representable(model: PreTrainedModel) -> PreTrainedModel:
    """The model with weights that bfloat16 holds exactly."""
    return model.to(torch.bfloat16)


def test_identity_does_not_depend_on_the_dtype_it_is_loaded_in() -> None:
    names = {
        dtype: Target(representable(tiny_model("llama")).to(dtype), name="same").identity()
        for dtype in (torch.bfloat16, torch.float32, torch.float64)
    }
    assert len(set(map(str, names.values()))) == 1
    # weights that bfloat16 does not hold: a file of float32 read as it is, or rounded on the way in
    assert (
        Target(tiny_model("llama", dtype=torch.float32), name="same").identity().weights
        == Target(tiny_model("llama", dtype=torch.float32).to(torch.bfloat16), name="same").identity().weights
    )


def test_identity_is_stored_whole() -> None:
    identity = small_target().identity()
    assert TargetIdentity.from_dict(identity.to_dict()) == identity
    assert identity.fields["hidden_size"] == 32 and identity.fields["model_type"] == "llama"
    assert identity.quantizer is None and identity.adapter is None
    stored = identity.to_dict()
    del stored["weights"]
    with pytest.raises(ValueError, match=r"missing fields \['weights'\] and unknown fields \['weight'\]"):
        TargetIdentity.from_dict({**stored, "weight": "x"})


def test_mismatches_name_the_fields_and_both_values() -> None:
    theirs = Target(tiny_model("llama"), name="org/theirs").identity()
    wide = Target(tiny_model("llama", hidden_size=64, head_dim=16), name="org/wide")
    with pytest.raises(TargetMismatch) as caught:
        wide.check(theirs)
    message = str(caught.value)
    assert "hidden_size 32 there, 64 here" in message and "head_dim 8 there, 16 here" in message
    assert "org/theirs" in message and "org/wide" in message and "allow_mismatch" in message
    assert "vocab_size" not in message and "weights" not in message
    wide.check(theirs, allow_mismatch=True)


def test_other_weights_of_the_same_shape_are_another_target() -> None:
    theirs = small_target().identity()
    with pytest.raises(TargetMismatch, match="same shape but other weights"):
        Target(tiny_model("llama", seed=1)).check(theirs)
    Target(tiny_model("llama"), name="moved/elsewhere").check(theirs)  # a name is not an identity


@pytest.mark.parametrize("part", ["embedding", "layer", "output"])
def test_each_sampled_part_counts(part: str) -> None:
    target = Target(tiny_model("llama"))
    before = target.identity().weights
    weight = {
        "embedding": target.embedding.weight,
        "layer": target.layers[2].mlp.down_proj.weight,
        "output": target.output.weight,
    }[part]
    with torch.no_grad():
        weight[0, 0] += 1
    assert Target(target.model).identity().weights != before


def test_every_weight_is_in_the_hash_of_all() -> None:
    target = Target(tiny_model("llama"))
    before = target.weights_hash()
    assert Target(tiny_model("llama")).weights_hash() == before
    for parameter in target.model.parameters():
        with torch.no_grad():
            parameter.view(-1)[-1] += 1
        assert target.weights_hash() != before
        with torch.no_grad():
            parameter.view(-1)[-1] -= 1
            parameter.copy_(parameter)


# adapters (cases.md H6) and padded vocabularies (H4)


def adapted(modules: list[str], seed: int = 0) -> PreTrainedModel:
    """A LoRA-wrapped model whose B is random, so that the adapter does something."""
    torch.manual_seed(seed)
    model = get_peft_model(tiny_model("llama"), LoraConfig(r=2, lora_alpha=4, target_modules=modules))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    return model.double()  # type: ignore[return-value]


@pytest.mark.parametrize("modules", [["q_proj", "v_proj"], ["down_proj", "lm_head"]], ids=["layers", "output matrix"])
def test_an_adapted_target_is_read_with_its_adapter_on(modules: list[str]) -> None:
    model = adapted(modules)
    target, ids = Target(model), random_ids(12)
    out = target.forward(ids, taps=(1, 2), hidden=True, logits_to_keep=3)
    theirs = model(ids, output_hidden_states=True)
    with model.disable_adapter():  # type: ignore[operator]
        bare = model(ids).logits
    assert relative(theirs.logits, bare) > 1e-3
    assert out.taps is not None and out.hidden is not None
    assert torch.equal(out.taps, torch.cat([theirs.hidden_states[1], theirs.hidden_states[2]], -1))
    assert relative(out.logits, theirs.logits[:, -3:]) <= 1e-12
    assert relative(target.project(out.hidden), theirs.logits) <= 1e-12
    rows = torch.tensor([2, 5, 7])
    assert relative(target.project_rows(out.hidden, rows), theirs.logits[..., rows]) <= 1e-12
    target.self_check()
    check_tree(target, 9)


def test_an_adapter_is_part_of_the_identity() -> None:
    plain = Target(tiny_model("llama")).identity()
    one, two = (Target(adapted(["q_proj", "v_proj"], seed)).identity() for seed in (1, 2))
    assert plain.adapter is None and one.adapter and two.adapter and one.adapter != two.adapter
    assert one.weights == two.weights == plain.weights, "the base is the same"
    assert one.fields == plain.fields
    with pytest.raises(TargetMismatch, match=r"adapter '\w+' there, None here"):
        Target(tiny_model("llama")).check(one)
    Target(adapted(["q_proj", "v_proj"], 1)).check(one)


def test_a_padded_vocabulary_counts_the_rows_of_the_output_matrix() -> None:
    model = tiny_model("llama", vocab=60)
    model.resize_token_embeddings(64, mean_resizing=False)
    target = Target(model)
    assert target.vocab_size == 64
    hidden = target.forward(random_ids(3, vocab=60), hidden=True).hidden
    assert isinstance(hidden, Tensor) and target.project(hidden).shape == (1, 3, 64)
