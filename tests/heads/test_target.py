"""Targets of every family: what is read of them is what the model computes, trees and sliding windows included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CohereConfig, GraniteConfig, PreTrainedModel

from heads.target import Target
from tests.heads.small import check_tree, random_ids, relative, small_target
from tests.tiny import FAMILIES, Family, tiny_model

SLIDING: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": 6}),
    "mistral narrow": ("mistral", {"sliding_window": 2}),  # narrower than the tree is deep
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
    # the state that heads are trained on is the one after the final norm
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
    first = target.forward(ids, taps=(0,)).taps
    assert first is not None and torch.equal(first, states[0])


def test_sizes_and_layers(target: Target) -> None:
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (4, 32, 64)
    assert len(target.layers) == 4 and len(target.layer_types) == 4
    assert target.max_positions == 512 and target.dtype == torch.float64
    assert not target.model.training
    assert target.embed(torch.tensor([[1, 2]])).shape == (1, 2, 32)


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
    assert "sliding_attention" in target.layer_types and target.sliding_window == settings["sliding_window"]
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


# soft-cap and scale


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
