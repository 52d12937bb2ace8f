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
    AutoModelForSeq2SeqLM,
    BartConfig,
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
    T5Config,
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

_T5 = {"hidden": "d_model", "inner": "d_ff", "layers": "num_layers", "decoder": "num_decoder_layers"}
_T5 |= {"heads": "num_heads"}
_BIASES = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
_BART = {"layers": "encoder_layers", "decoder": "decoder_layers", "positions": "max_position_embeddings"}
_BART_SIZES = {"d_model": HIDDEN, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
_BART_SIZES |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64}

SEQ2SEQ: dict[str, Family] = {
    "t5": Family(T5Config, _T5, {"d_kv": 8, **_BIASES}),
    "bart": Family(BartConfig, _BART, {**_BART_SIZES, "dropout": 0.0, "forced_eos_token_id": None}),
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
    settings = {"tie_word_embeddings": False, "bos_token_id": None, "pad_token_id": None}
    return _made(AutoModelForCausalLM, row, sizes, settings, overrides, dtype, vocab, seed, attention)


def tiny_seq2seq(
    family: str,
    *,
    dtype: torch.dtype = torch.float64,
    vocab: int = 64,
    layers: int = 2,
    encoder: int = 2,
    seed: int = 2,
    attention: str | None = None,
    **overrides: Any,
) -> Any:
    """A random encoder-decoder of ``family`` (see :data:`SEQ2SEQ`) with so many layers in its decoder and encoder.

    Its decoder starts with token 0, nothing ends its text, and token 1 is padding.
    """
    row = SEQ2SEQ[family]
    sizes = {"hidden": HIDDEN, "inner": 64, "layers": encoder, "decoder": layers, "heads": 4, "positions": POSITIONS}
    settings = {"tie_word_embeddings": False, "decoder_start_token_id": 0, "pad_token_id": 1, "bos_token_id": None}
    return _made(AutoModelForSeq2SeqLM, row, sizes, settings, overrides, dtype, vocab, seed, attention)


# parts of an encoder-decoder whose weights are scaled further: positions are heard, and the prompt does not drown all
_LOUDER = {"relative_attention_bias": 7.0, "embed_positions": 7.0, ".q.weight": 8**-0.5}
_LOUDER |= {"encoder_attn.out_proj.weight": 0.15, "EncDecAttention.o.weight": 0.15}


def _made(
    kind: Any,
    row: Family,
    sizes: dict[str, int],
    settings: dict[str, Any],
    overrides: dict[str, Any],
    dtype: torch.dtype,
    vocab: int,
    seed: int,
    attention: str | None,
) -> Any:
    named = {row.names[key]: value for key, value in sizes.items() if key in row.names}
    config = row.config(**(named | {"vocab_size": vocab, "eos_token_id": None} | settings | row.extra | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.from_config(config, dtype=torch.float32, attn_implementation=attention)
        _scale_like_trained(model, config.tie_word_embeddings)
    model = model.to(dtype).eval()  # drawn in float32, so that every dtype holds the same model
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        setattr(model.generation_config, name, overrides.get(name, settings.get(name)))
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
        for part, factor in _LOUDER.items():
            if part in name and model.config.is_encoder_decoder:
                parameter.mul_(factor)


@lru_cache(maxsize=2)
def real_target(dtype: torch.dtype = torch.float32) -> Target:
    """The embedded target; tests that call this are marked ``real`` and few, since loading takes seconds."""
    from heads.embedded import NAME
    from heads.target import Target

    return Target.load(NAME, dtype=dtype)
