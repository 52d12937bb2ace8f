"""Small random targets for fast tests, one row a model family, and the real embedded target, loaded once a process.

A freshly initialised transformers model answers almost the same logits for everything: its arg-max hangs on the last
bits and its text repeats one token. Here weights are drawn at the scale of trained ones, so that gaps between the two
best tokens are far above rounding and the text depends on what came before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

if TYPE_CHECKING:
    from heads.target import Target

HIDDEN = 32
POSITIONS = 512


@dataclass(frozen=True)
class Family:
    """A configuration class, the names it uses for the common sizes, and what else it needs to be small."""

    config: type[PreTrainedConfig]
    names: dict[str, str]
    extra: dict[str, Any]


_COMMON = {
    "hidden": "hidden_size",
    "inner": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "positions": "max_position_embeddings",
}
_NO_GQA = {key: name for key, name in _COMMON.items() if key != "kv_heads"}
_GPT2 = {"hidden": "n_embd", "inner": "n_inner", "layers": "n_layer", "heads": "n_head", "positions": "n_positions"}
_OPT = {**_NO_GQA, "inner": "ffn_dim"}
_FALCON = {**_COMMON, "inner": "ffn_hidden_size", "kv_heads": "num_kv_heads"}
# transformers' grouped matrix product, the default for experts, knows no float64
_EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
_QWEN_EXPERTS = {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 16, "decoder_sparse_step": 1}

FAMILIES: dict[str, Family] = {
    "llama": Family(LlamaConfig, _COMMON, {}),
    "qwen2": Family(Qwen2Config, _COMMON, {}),
    "qwen3": Family(Qwen3Config, _COMMON, {"head_dim": 8}),
    "mistral": Family(MistralConfig, _COMMON, {"sliding_window": None}),
    "gemma2": Family(Gemma2Config, _COMMON, {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16}),
    "gemma3": Family(Gemma3TextConfig, _COMMON, {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16}),
    "gpt2": Family(GPT2Config, _GPT2, {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "gptneox": Family(GPTNeoXConfig, _NO_GQA, {}),
    "phi3": Family(Phi3Config, _COMMON, {}),
    "falcon": Family(FalconConfig, _FALCON, {"new_decoder_architecture": True}),
    "mixtral": Family(MixtralConfig, _COMMON, {**_EXPERTS, "num_local_experts": 4}),
    "qwen2moe": Family(Qwen2MoeConfig, _COMMON, {**_QWEN_EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3moe": Family(Qwen3MoeConfig, _COMMON, {**_QWEN_EXPERTS, "head_dim": 8}),
    "opt": Family(OPTConfig, _OPT, {"word_embed_proj_dim": HIDDEN, "dropout": 0.0, "attention_dropout": 0.0}),
}


def tiny_model(
    family: str,
    *,
    dtype: torch.dtype = torch.float64,
    vocab: int = 64,
    layers: int = 4,
    seed: int = 0,
    attention: str | None = None,
    **overrides: Any,
) -> Any:
    """A random causal LM of ``family`` (see :data:`FAMILIES`) with hidden size 32 and 4 heads over 2 key/value heads.

    It has no special tokens (nothing ends its text), its output matrix is its own unless
    ``tie_word_embeddings=True``, and the same arguments give the same weights. ``attention`` is transformers' own
    choice by default, ``"sdpa"`` wherever there is one. ``overrides`` go to the configuration under transformers'
    own names, e.g. ``sliding_window=16`` for ``"mistral"``.
    """
    row = FAMILIES[family]
    sizes = {"hidden": HIDDEN, "inner": 64, "layers": layers, "heads": 4, "kv_heads": 2, "positions": POSITIONS}
    settings: dict[str, Any] = {row.names[key]: value for key, value in sizes.items() if key in row.names}
    settings |= {"vocab_size": vocab, "tie_word_embeddings": False}
    settings |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = row.config(**(settings | row.extra | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
        _scale_like_trained(model, config.tie_word_embeddings)
    model = model.to(dtype).eval()  # drawn in float32, so that every dtype holds the same model
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        setattr(model.generation_config, name, overrides.get(name))
    return model


@torch.no_grad()
def _scale_like_trained(model: Any, tied: bool) -> None:
    """Matrices keep the size of what they map; embeddings have unit rows' scale; gains and biases are shaken a bit."""
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    for name, parameter in model.named_parameters():
        if parameter is embedding:
            parameter.normal_(std=1 / math.sqrt(HIDDEN) if tied else 1.0)
        elif parameter is output:
            parameter.normal_(std=3 / math.sqrt(HIDDEN))
        elif parameter.dim() >= 2:  # the experts of a mixture lie in one tensor
            parameter.normal_(std=2 / math.sqrt(HIDDEN))
        elif name.endswith("bias"):
            parameter.normal_(std=0.1)
        else:
            parameter.add_(torch.randn_like(parameter) * 0.1)


@lru_cache(maxsize=2)
def real_target(dtype: torch.dtype = torch.float32) -> Target:
    """The embedded target; tests that call this are marked ``real`` and few, since loading takes seconds."""
    from heads.embedded import NAME
    from heads.target import Target

    return Target.load(NAME, dtype=dtype)
