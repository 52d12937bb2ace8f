"""Families whose layers are unusual: exact, exact for chains only, or refused with the layer's type by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    BloomConfig,
    FalconConfig,
    GPTNeoConfig,
    JambaConfig,
    Llama4TextConfig,
    Mamba2Config,
    MambaConfig,
    OpenAIGPTConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
)

import infer
from heads.grow import Budget
from infer.decode import PositionLimit
from infer.drafters.draft_model import DraftModelDrafter
from tests.infer.fakes import Oracle, RandomTree, Wrong
from tests.tiny import tiny_model

PROMPT = torch.tensor([[7, 3, 44, 12, 9, 30, 21, 5, 60]])
TREE = Budget(rows=12, depth=4, width=3)
EAGER_EXPERTS: dict[str, Any] = {"experts_implementation": "eager"}  # the default knows no float64
NO_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@torch.no_grad()
def made(config: PreTrainedConfig) -> Any:
    """A random model of the configuration, with clear winners, in float64."""
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    embedding = model.get_input_embeddings().weight
    for parameter in model.parameters():
        if parameter is embedding:
            parameter.normal_(std=1.0)
        elif parameter.dim() >= 2:
            parameter.normal_(std=2 / math.sqrt(32))
    for name in NO_IDS:
        setattr(model.generation_config, name, None)
    return model.double().eval()


def untapped(drafter: Any) -> Any:
    drafter.taps = ()
    return drafter


def greedy(model: Any, ids: Tensor = PROMPT, new: int = 40) -> list[int]:
    return model.generate(ids, max_new_tokens=new, do_sample=False)[0].tolist()


def check(model: Any, draft: Any, text: list[int], ids: Tensor = PROMPT, budget: Budget | None = None) -> None:
    new = len(text) - ids.shape[1]
    out = infer.generate(model, ids, draft, max_new_tokens=new, do_sample=False, budget=budget or Budget.chain(4))
    assert out.sequences[0].tolist() == text


# sliding windows, text much longer than them


@pytest.mark.parametrize("family", ["mistral", "phi3", "gemma2", "gemma3"])
@pytest.mark.parametrize("window", [2, 4, 7])
def test_text_of_many_windows(family: str, window: int) -> None:
    """A window narrower than the draft is deep, as deep, and a bit wider; the prompt alone is three of them."""
    model = tiny_model(family, layers=2 if family != "gemma3" else 6, sliding_window=window)
    prompt = torch.arange(3 * 7)[None] * 5 % 64
    text = greedy(model, prompt, 30)
    for draft in (Oracle(text, ()), Wrong(text, ())):
        check(model, draft, text, prompt)
    for seed in (0, 1):
        check(model, untapped(RandomTree(text, seed)), text, prompt, TREE)


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_a_window_of_one(family: str) -> None:
    """transformers' own sliding cache (5.24) drops nothing then; without a cache it says what the window says."""
    model = tiny_model(family, layers=2 if family != "gemma3" else 6, sliding_window=1)
    text = model.generate(PROMPT, max_new_tokens=20, do_sample=False, use_cache=False)[0].tolist()
    assert text != greedy(model, new=20)
    for draft in ("none", Oracle(text, ())):
        check(model, draft, text)
    check(model, untapped(RandomTree(text)), text, budget=TREE)


# rotary embeddings that depend on the length

LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0]}
ROPES: dict[str, dict[str, Any]] = {
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 24},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
}


@pytest.mark.parametrize("rope", ROPES)
def test_scaled_rotary_embeddings(rope: str) -> None:
    model = tiny_model("llama", layers=2, rope_parameters=ROPES[rope], max_position_embeddings=64)
    text = greedy(model)
    for draft in ("none", Oracle(text, ()), Wrong(text, ())):
        check(model, draft, text)
    check(model, untapped(RandomTree(text)), text, budget=TREE)


@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_no_text_grows_across_the_border_of_longrope(family: str) -> None:
    """On one side of it, or on the other: exact. A pass that reaches over turns all of its positions differently."""
    rope = LONG | {"original_max_position_embeddings": 24, "factor": 4.0}
    extra: dict[str, Any] = {"original_max_position_embeddings": 24} if family == "phi3" else {}
    model = tiny_model(family, layers=2, rope_parameters=rope, max_position_embeddings=96, **extra)
    beyond = torch.arange(30)[None] * 5 % 64
    below, above = greedy(model, PROMPT, 24 - PROMPT.shape[1]), greedy(model, beyond, 40)
    for text, prompt in ((below, PROMPT), (above, beyond)):
        for draft in ("none", Oracle(text, ()), Wrong(text, ())):
            check(model, draft, text, prompt)
        check(model, untapped(RandomTree(text)), text, prompt, TREE)
        with pytest.raises(PositionLimit, match="24 positions before its LongRoPE factors change"):
            infer.generate(model, PROMPT, Wrong(text, ()), max_new_tokens=40, do_sample=False)
    padded = torch.cat([torch.zeros(1, 30 - PROMPT.shape[1], dtype=torch.long), PROMPT], 1)
    both, mask = torch.cat([padded, beyond]), torch.ones(2, 30, dtype=torch.long)
    mask[0] = (padded[0] != 0).long()
    new = 24 - PROMPT.shape[1]
    out = infer.generate(model, both, "lookup:1", attention_mask=mask, max_new_tokens=new, do_sample=False)
    assert out.sequences[0, padded.shape[1] - PROMPT.shape[1] :].tolist() == below
    assert out.sequences[1].tolist() == above[: 30 + new]


# attention by places in the cache: chains only

BY_PLACE: dict[str, PreTrainedConfig] = {
    "ALiBi biases": BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, **NO_IDS),
    "ALiBi": FalconConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True, **NO_IDS
    ),
    "local windows": GPTNeoConfig(
        vocab_size=64,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
        max_position_embeddings=128,
        **NO_IDS,
    ),
    "attention chunks": Llama4TextConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        intermediate_size_mlp=64,
        num_local_experts=2,
        attention_chunk_size=16,
        **EAGER_EXPERTS,
        **NO_IDS,
    ),
}


@pytest.mark.parametrize("what", BY_PLACE)
def test_attention_by_places_reads_chains_only(what: str) -> None:
    model = made(BY_PLACE[what])
    text = greedy(model)
    for draft in ("none", Oracle(text, ()), Wrong(text, ()), "lookup:1", DraftModelDrafter(model)):
        check(model, draft, text)
    with pytest.raises(ValueError, match=f"chains only, because its {what}"):
        check(model, Oracle(text, ()), text, budget=TREE)

    class Trees(RandomTree):
        def draft(self, budget: Budget, sampler: Any) -> Any:
            return super().draft(TREE, sampler)

    with pytest.raises(ValueError, match=f"reads neither trees .* because its {what}.* go by places"):
        check(model, untapped(Trees(text)), text)


def test_several_texts_are_then_decoded_one_after_another() -> None:
    model = made(BY_PLACE["ALiBi biases"])
    prompts = torch.tensor([[0, 0, 5, 9, 12], [7, 3, 44, 12, 9]])
    mask = (prompts != 0).long()
    alone = [greedy(model, prompts[:1, 2:], 20), greedy(model, prompts[1:], 20)]
    for draft in ("none", "lookup:1"):
        out = infer.generate(
            model, prompts, draft, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0
        )
        assert [out.sequences[0, 2:].tolist(), out.sequences[1].tolist()] == alone


# states that cannot be rolled back

_SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}
_MAMBA: dict[str, Any] = {"mamba_d_state": 4, "mamba_n_heads": 4, "mamba_d_head": 16}
ROLLED = "of type '{}' .*cannot be rolled back after a rejected draft"
REFUSED: dict[str, tuple[PreTrainedConfig, str]] = {
    "mamba": (MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4), "linear_attention"),
    "mamba2": (
        Mamba2Config(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4, num_heads=4, head_dim=16),
        "linear_attention",
    ),
    "recurrent gemma": (
        RecurrentGemmaConfig(num_hidden_layers=3, lru_width=32, attention_window_size=8, **_SMALL),
        "linear_attention",
    ),
    "jamba": (
        JambaConfig(num_hidden_layers=2, attn_layer_period=2, attn_layer_offset=1, num_experts=2, **_SMALL),
        "linear_attention",
    ),
    "bamba": (BambaConfig(num_hidden_layers=2, attn_layer_indices=[1], **_MAMBA, **_SMALL), "linear_attention"),
    "qwen3 next": (
        Qwen3NextConfig(num_hidden_layers=4, head_dim=8, num_experts=2, moe_intermediate_size=16, **_SMALL),
        "linear_attention",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("draft", ["none", "lookup"])
def test_recurrent_and_hybrid_layers_are_refused_by_type(name: str, draft: str) -> None:
    config, kind = REFUSED[name]
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=ROLLED.format(kind)):
        infer.generate(model, PROMPT, draft, max_new_tokens=3)


NO_CACHE: dict[str, PreTrainedConfig] = {
    "OpenAIGPTLMHeadModel": OpenAIGPTConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "RwkvForCausalLM": RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32),
}


@pytest.mark.parametrize("name", NO_CACHE)
def test_models_that_would_swallow_the_cache_are_refused(name: str) -> None:
    model = AutoModelForCausalLM.from_config(NO_CACHE[name])
    with pytest.raises(ValueError, match=f"{name} keeps no keys and values between passes"):
        infer.generate(model, PROMPT, max_new_tokens=3)
