"""What SGLang 0.5.23 makes of an exported folder, as its source says: the parameters it has, and whence they come.

Its loaders pass over tensors that they do not know and leave what nobody set as it was made, both without a word, so
that only a comparison of all names and shapes shows a wrong folder. Written down from ``llama_eagle3.py``,
``llama_eagle.py``, ``dflash.py``, ``dspark.py`` in its ``models/``, and from ``spec_aux_hidden_state.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

Shapes = dict[str, tuple[int, ...]]
VERSION = "0.5.23"
OLD_NAMES = {
    "midlayer": "layers.0",
    "aux_norm_low": "fc_norm.0",
    "aux_norm_mid": "fc_norm.1",
    "aux_norm_high": "fc_norm.2",
}


def _layer(config: Any, i: int, read: int, norms: list[str]) -> Shapes:
    """Layer ``i``, whose attention reads so many numbers."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    rows = {"q": config.num_attention_heads * dim, "k": config.num_key_value_heads * dim}
    rows["v"] = rows["k"]
    return {
        **{f"layers.{i}.self_attn.{name}_proj.weight": (count, read) for name, count in rows.items()},
        f"layers.{i}.self_attn.o_proj.weight": (hidden, rows["q"]),
        f"layers.{i}.mlp.gate_proj.weight": (inner, hidden),
        f"layers.{i}.mlp.up_proj.weight": (inner, hidden),
        f"layers.{i}.mlp.down_proj.weight": (hidden, inner),
        **{f"layers.{i}.{name}.weight": (hidden,) for name in norms},
    }


def _eagle3(config: Any) -> Shapes:
    inner = getattr(config, "eagle_config", None) or {}
    ids = inner.get("eagle_aux_hidden_state_layer_ids")
    count = getattr(config, "num_aux_hidden_states", None) or (len(ids) if ids else 3)
    tap, hidden = getattr(config, "target_hidden_size", config.hidden_size), config.hidden_size
    found: Shapes = {"fc.weight": (hidden, count * tap), "norm.weight": (hidden,)}
    found["lm_head.weight"] = (config.draft_vocab_size, hidden)
    if getattr(config, "bias", False):
        found["fc.bias"] = (hidden,)
    if inner.get("norm_before_fc", getattr(config, "norm_before_fc", False)):
        found["input_norm.weight"] = (count * tap,)
    if getattr(config, "fc_norm", None) or getattr(config, "use_aux_norm", False):
        found |= {f"fc_norm.{i}.weight": (tap,) for i in range(count)}
    norms = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    for i in range(config.num_hidden_layers):
        found |= _layer(config, i, hidden if i else 2 * hidden, norms)
    return found


def _eagle1(config: Any) -> Shapes:
    hidden = config.hidden_size
    norms = ["post_attention_layernorm"]  # the first layer's other norm is taken out
    return {"fc.weight": (hidden, 2 * hidden), "fc.bias": (hidden,)} | _layer(config, 0, hidden, norms)


def _dflash(config: Any) -> Shapes:
    hidden, taps = config.hidden_size, len(config.dflash_config["target_layer_ids"])
    assert set(config.layer_types) == {"full_attention"}, "by which its slots see each other, since is_causal is silent"
    found: Shapes = {"fc.weight": (hidden, taps * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in range(config.num_hidden_layers):
        found |= _layer(config, i, hidden, ["input_layernorm", "post_attention_layernorm"])
        found |= {f"layers.{i}.self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    return found


def _dspark(config: Any) -> Shapes:
    assert config.markov_head_type == "vanilla" and getattr(config, "sample_from_anchor", True)
    matrix = (config.vocab_size, config.markov_rank)
    return _dflash(config) | {f"markov_head.markov_w{i}.weight": matrix for i in (1, 2)}


# architecture → its parameters, which are not the target's; tensors it knows and does not load as one
ARCHITECTURES: dict[str, tuple[Callable[[Any], Shapes], set[str]]] = {
    "LlamaForCausalLMEagle3": (_eagle3, {"d2t", "t2d"}),
    "LlamaForCausalLMEagle": (_eagle1, set()),
    "DFlashDraftModel": (_dflash, set()),
    # the confidence is built only where SGLANG_RAGGED_VERIFY_MODE is not "static", its default
    "Qwen3DSparkModel": (_dspark, {"confidence_head.proj.weight", "confidence_head.proj.bias"}),
}


def loaded(folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """Configuration, through transformers as SGLang reads it, and the tensors that it sets parameters from.

    Raises:
        AssertionError: it would pass over a tensor, or leave a parameter as it was made.
    """
    config = AutoConfig.from_pretrained(folder)
    parameters, known = ARCHITECTURES[config.architectures[0]]
    held = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for old, new in OLD_NAMES.items():
            name = name.replace(old, new)
        held[name] = tensor
    shapes = {name: tuple(tensor.shape) for name, tensor in held.items() if name not in known}
    assert shapes == parameters(config)
    assert config.tie_word_embeddings is False, "else its output matrix is its embedding"
    return config, held


def target_ids(config: Any, tensors: dict[str, Tensor]) -> list[int]:
    """EAGLE-3: the target's token of each row of the output matrix; without a map a row's own number."""
    offsets = tensors.get("d2t")
    rows = torch.arange(config.draft_vocab_size)
    assert offsets is not None or config.draft_vocab_size == config.vocab_size, "its drafts would be other tokens"
    return (rows if offsets is None else rows + offsets).tolist()


def captured(config: Any, layers: int) -> list[int]:
    """Which of transformers' hidden states a Llama or Qwen3 target of so many layers hands over.

    It takes the input of a layer, whose number is an id and one; EAGLE-3's ids are read inside ``eagle_config`` alone.
    """
    if block := getattr(config, "dflash_config", None):
        assert all(0 <= i < layers for i in block["target_layer_ids"])
        return [i + 1 for i in block["target_layer_ids"]]
    ids = (getattr(config, "eagle_config", None) or {}).get("eagle_aux_hidden_state_layer_ids")
    return [i + 1 for i in ids] if ids else [2, layers // 2, layers - 3]
