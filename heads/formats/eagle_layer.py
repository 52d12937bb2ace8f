"""What the flat and the speculators form of EAGLE-3 share: the layer's names and its settings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heads.base import DraftHeads
from heads.formats.checkpoint import Checkpoint
from heads.formats.compare import EMBEDDING, check_embedding
from heads.formats.draft_map import from_offsets, to_offsets
from heads.formats.format import FormatError, Plan, stored
from heads.formats.settings import Settings
from heads.target import Target

# our layer's part → theirs, inside the layer
PARTS = {
    **{name: f"{name}.weight" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
    **{name: f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{name: f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")},
}
PORTABLE_LAYERS = 7  # a target of fewer has no three different default taps
REFUSED = {
    "norm_before_residual": "the residual is the state before its norm here",
    "norm_before_fc": "a norm over all taps together has no counterpart here",
    "attention_bias": "attention has no biases here",
    "mlp_bias": "the feed-forward part has no biases here",
}


def names(prefix: str, fc_norms: int) -> dict[str, str]:
    """Our tensor → theirs, for a layer under ``prefix`` and so many norms before ``fc``."""
    return {
        "fc.weight": "fc.weight",
        **{f"layer.{ours}.weight": f"{prefix}.{theirs}" for ours, theirs in PARTS.items()},
        **{f"fc_norms.{i}.weight": f"fc_norm.{i}.weight" for i in range(fc_norms)},
        "norm.weight": "norm.weight",
        "lm_head.weight": "lm_head.weight",
    }


def tensors(heads: DraftHeads, prefix: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The heads' tensors under the engines' names, and the map of a reduced vocabulary."""
    config, state = heads.config, heads.state_dict()
    renamed = names(prefix, len(config.taps) if config.options["fc_norm"] else 0)
    found = {theirs: stored(state[ours], dtype) for ours, theirs in renamed.items()}
    if config.draft_vocab_size is not None:
        found |= to_offsets(heads.target_ids, config.vocab_size)
    return found


def layer_config(heads: DraftHeads) -> dict[str, Any]:
    """The decoder layer as a Llama configuration of one layer.

    Raises:
        FormatError: the target does not say how long its texts may be.
    """
    options, positions = heads.config.options, heads.target.max_positions
    if positions is None:
        raise FormatError(f"{heads.target.name} has no max_position_embeddings, which the engines need")
    shape = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    return {
        "model_type": "llama",
        "hidden_size": heads.config.hidden_size,
        **{key: options[key] for key in shape},
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": options["rms_norm_eps"],
        "rope_theta": options["rope_theta"],
        "rope_scaling": None,
        "max_position_embeddings": positions,
        "vocab_size": heads.config.vocab_size,
        "tie_word_embeddings": False,
    }


def check_taps(heads: DraftHeads) -> None:
    """The engines hand taps over in the order of their layers, and can capture the inputs of layers 1 and up.

    Raises:
        FormatError: the heads' taps are not of that kind.
    """
    taps, n = heads.config.taps, heads.target.num_layers
    if list(taps) != sorted(set(taps)) or taps[0] < 1 or taps[-1] >= n:
        raise FormatError(
            f"taps {list(taps)} cannot be served: engines capture distinct ones in ascending order, between 1 and "
            f"{n - 1} of this target's {n} layers (its last state is taken before the final norm there)"
        )


def plan(
    checkpoint: Checkpoint,
    target: Target,
    settings: Settings,
    layer: Settings,
    taps: tuple[int, ...],
    lookahead: int | None,
) -> Plan:
    """The plan of EAGLE-3 heads.

    Args:
        settings, layer: where EAGLE-3's own fields and where the layer's stand; the same in the flat form.
        taps: as transformers counts hidden states.

    Raises:
        FormatError: the checkpoint does what our kind cannot, or its fields and tensors disagree.
    """
    for key, reason in REFUSED.items():
        for place in (settings, layer):
            if place.flag(key, False):
                raise FormatError(f"{place.where}: {key} is true, and these heads cannot be imported: {reason}")
    if any(name.startswith("layers.1.") for name in checkpoint.entries):
        raise FormatError(f"{checkpoint.path} has more than one decoder layer: heads of kind eagle have one")
    prefix = "midlayer" if any(name.startswith("midlayer.") for name in checkpoint.entries) else "layers.0"
    width, read = checkpoint.shape("fc.weight", 2)
    told = layer.whole("hidden_size", width)
    if not told == width == target.hidden_size or settings.whole("target_hidden_size", width) != width:
        raise FormatError(
            f"{checkpoint.path}: hidden_size is {told} in its config, {width} in fc.weight, "
            f"{target.hidden_size} in {target.name}: all must be the same"
        )
    if read != len(taps) * width:
        raise FormatError(
            f"{checkpoint.path}: fc.weight reads {read} numbers, {read / width:g} taps of {width}, and the taps are "
            f"{list(taps)}: the layer ids in the config are not these heads'"
        )
    rows = checkpoint.shape("lm_head.weight", 2)[0]
    reduced = from_offsets(checkpoint, settings, rows, target.vocab_size)
    check_embedding(checkpoint, target)
    fc_norm = settings.flag("fc_norm", False)
    return Plan(
        kind="eagle",
        lookahead=lookahead,
        taps=taps,
        options=shape(checkpoint, layer, prefix, width)
        | {
            "rope_theta": theta(layer, 10000.0),
            "rms_norm_eps": layer.number("rms_norm_eps", 1e-6),
            "fc_norm": fc_norm,
            "norm_output": settings.flag("norm_output", False),
        },
        names=names(prefix, len(taps) if fc_norm else 0),
        also=frozenset({"d2t", "t2d", EMBEDDING} & checkpoint.entries.keys()),
        target_ids=None if reduced is None or rows == target.vocab_size else reduced[0],
        order={} if reduced is None else {"lm_head.weight": reduced[1]},
    )


def shape(checkpoint: Checkpoint, layer: Settings, prefix: str, width: int) -> dict[str, int]:
    """The layer's sizes: counted in the tensors, of which only the width of one attention head cannot be told."""
    queries = checkpoint.shape(f"{prefix}.self_attn.q_proj.weight", 2)[0]
    keys = checkpoint.shape(f"{prefix}.self_attn.k_proj.weight", 2)[0]
    said = layer.whole("num_attention_heads") if "head_dim" not in layer else 0  # one of both must be there
    dim = layer.whole("head_dim", max(1, width // said) if said else None)
    for key, count in {"num_attention_heads": queries, "num_key_value_heads": keys}.items():
        if count % dim or layer.whole(key, count // dim) != count // dim:
            raise FormatError(
                f"{layer.where}: {key} is {layer.values.get(key)} with head_dim {dim}, and the projection in "
                f"{checkpoint.path} has {count} rows"
            )
    if layer.text("hidden_act", "silu") != "silu":
        raise FormatError(f"{layer.where}: hidden_act is {layer.values['hidden_act']!r}, only 'silu' can be imported")
    return {
        "num_attention_heads": queries // dim,
        "num_key_value_heads": keys // dim,
        "head_dim": dim,
        "intermediate_size": checkpoint.shape(f"{prefix}.mlp.gate_proj.weight", 2)[0],
    }


def theta(layer: Settings, default: float | None) -> float:
    """Rotary base; where the config does not say, what a format's own project means then, whatever the target's is.

    Raises:
        FormatError: the positions are stretched, or nothing says and there is no default.
    """
    for key in ("rope_scaling", "rope_parameters"):
        part = layer.part(key)
        kind = part.text("rope_type", part.text("type", "default"))
        if kind != "default":
            raise FormatError(f"{part.where} is of type {kind!r}: these heads have plain rotary positions")
    inner = layer.part("rope_parameters")
    return inner.number("rope_theta") if "rope_theta" in inner else layer.number("rope_theta", default)
