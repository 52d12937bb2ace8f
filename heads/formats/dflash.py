"""DFlash's form: a few layers with normed queries and keys, target embedding and output matrix shared.

Block heads have it where their slots draft the token of their own place (``shifted: false``) and where nothing else
stands on the logits; vLLM and SGLang load the same folder. An id l in ``target_layer_ids`` is transformers' hidden
state l + 1, the output of layer l; the last one is never read, because transformers keeps it only after the final norm.
"""

from __future__ import annotations

from typing import Any

import torch

from heads.base import DraftHeads
from heads.formats.checkpoint import Checkpoint
from heads.formats.compare import EMBEDDING, check_embedding
from heads.formats.eagle_layer import check_taps, layer_config, shape, theta
from heads.formats.format import (
    ENGINES,
    Choice,
    Files,
    Format,
    FormatError,
    Plan,
    Request,
    engine_of,
    only_kind,
    stored,
)
from heads.formats.settings import Settings
from heads.target import Target

NAME = "dflash"
IDS = "target_layer_ids"
PARTS = {
    **{name: f"{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")},
    **{name: f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")},
    **{name: f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")},
}
# option of block heads → the value that it has in this form, and why it can have no other
FIXED: dict[str, tuple[Any, str]] = {
    "shifted": (False, "DFlash's slots draft the token of their own place"),
    "markov_rank": (0, "a bias by the token before has no place in it"),
    "own_output": (False, "it shares the target's output matrix"),
    "confidence": (False, "a confidence has no place in it"),
}
REFUSED = {
    "attention_bias": "attention has no biases here",
    "is_causal": "slots see each other here",
    "causal": "slots see each other here",
    "use_swa": "layers see the whole context here",
}


def names(layers: int) -> dict[str, str]:
    """Our tensor → theirs."""
    return {
        **{f"{name}.weight": f"{name}.weight" for name in ("fc", "hidden_norm", "norm")},
        **{
            f"layers.{i}.{ours}.weight": f"layers.{i}.{theirs}" for i in range(layers) for ours, theirs in PARTS.items()
        },
    }


def write(heads: DraftHeads, request: Request) -> Files:
    """The folder.

    Raises:
        FormatError: other heads than block heads, or such as do what this form cannot hold.
    """
    only_kind(heads, "block", NAME, "its layers draft a block of masks in one pass, which these do not")
    engine_of(request, ENGINES, NAME)
    check_taps(heads)
    check_embedding_is_bare(heads)
    own, options = heads.config, heads.config.options
    check_fixed(heads, FIXED, NAME)
    if own.draft_vocab_size is not None:
        raise FormatError(f"a draft vocabulary of {own.draft_vocab_size} has no place in the dflash form")
    config = block_config(heads, request) | {
        "architectures": ["DFlashDraftModel"],
        "block_size": own.lookahead + 1,
        "dflash_config": {"mask_token_id": options["mask_token_id"], IDS: [tap - 1 for tap in own.taps]},
    }
    state = heads.state_dict()
    held = {theirs: stored(state[ours], request.dtype) for ours, theirs in names(options["layers"]).items()}
    return Files(config, "model.safetensors", held, ENGINES)


def check_embedding_is_bare(heads: DraftHeads) -> None:
    """Engines feed the layers bare rows of the embedding, and no norm makes a scale on them good, as EAGLE-3's would.

    Raises:
        FormatError: the target does more with them.
    """
    target = heads.target
    ids = torch.arange(min(8, target.vocab_size), device=target.device)
    if not torch.equal(target.embed(ids), target.embedding.weight[ids]):
        raise FormatError(
            f"{target.name} scales its embeddings, which block heads then read; vLLM's block drafts read bare rows"
        )


def check_fixed(heads: DraftHeads, fixed: dict[str, tuple[Any, str]], name: str) -> None:
    """Refuse options that a form cannot say.

    Raises:
        FormatError: the first of them, with the reason.
    """
    for key, (value, reason) in fixed.items():
        if heads.config.options[key] != value:
            raise FormatError(f"block heads with {key} {heads.config.options[key]} have no {name} form: {reason}")


def block_config(heads: DraftHeads, request: Request) -> dict[str, Any]:
    """The layers as a Qwen3 configuration, and the target's depth."""
    return layer_config(heads) | {
        "model_type": "qwen3",
        "num_hidden_layers": heads.config.options["layers"],
        "attention_bias": False,
        "torch_dtype": str(request.dtype).removeprefix("torch."),
        "num_target_layers": heads.target.num_layers,
    }


def recognises(checkpoint: Checkpoint) -> bool:
    """A norm behind ``fc``, and layers with normed queries."""
    return {"hidden_norm.weight", "layers.0.self_attn.q_norm.weight"} <= checkpoint.entries.keys()


def read(checkpoint: Checkpoint, target: Target, choice: Choice) -> Plan:
    """The plan of a DFlash checkpoint; a look-ahead may be shorter than its block, not longer.

    Raises:
        FormatError: it is for a target of another size, or does what block heads do not.
    """
    settings = Settings.of(checkpoint.config, checkpoint.path)
    inner = settings.part("dflash_config")
    refuse(settings, inner, target)
    slots = inner.whole("block_size") if "block_size" in inner else settings.whole("block_size")
    lookahead = choice.lookahead or slots - 1
    if not 0 < lookahead < slots:
        raise FormatError(f"{settings.where}: a block_size of {slots} drafts 1 to {slots - 1} tokens, not {lookahead}")
    check_embedding(checkpoint, target)
    return Plan(
        kind="block",
        lookahead=lookahead,
        taps=layer_taps(inner, target),
        options=layer_options(checkpoint, settings)
        | {key: value for key, (value, _) in FIXED.items()}
        | {"mask_token_id": inner.count("mask_token_id")},
        names=names(layer_count(checkpoint)),
        also=frozenset({EMBEDDING} & checkpoint.entries.keys()),
    )


def layer_count(checkpoint: Checkpoint) -> int:
    """Layers, counted in the tensors."""
    held = checkpoint.entries
    return next(i for i in range(len(held) + 1) if f"layers.{i}.self_attn.q_proj.weight" not in held)


def layer_options(checkpoint: Checkpoint, settings: Settings) -> dict[str, Any]:
    """Options that the layers' tensors and settings tell."""
    return shape(checkpoint, settings, "layers.0", checkpoint.shape("fc.weight", 2)[0]) | {
        "layers": layer_count(checkpoint),
        "rope_theta": theta(settings, None),  # readers of this form differ in what silence means
        "rms_norm_eps": settings.number("rms_norm_eps", 1e-6),
    }


def refuse(settings: Settings, inner: Settings, target: Target) -> None:
    """What block heads do not do, and targets of another depth.

    Raises:
        FormatError: names the field.
    """
    for key, reason in REFUSED.items():
        for place in (settings, inner):
            if place.flag(key, False):
                raise FormatError(f"{place.where}: {key} is true, and these heads cannot be imported: {reason}")
    kinds = settings.values.get("layer_types") or ["full_attention"]
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise FormatError(f"{settings.where}: layer_types must all be full_attention: {REFUSED['use_swa']}")
    deep = settings.whole("num_target_layers", target.num_layers)
    if deep != target.num_layers:
        raise FormatError(
            f"{settings.where}: num_target_layers is {deep}, and {target.name} has {target.num_layers} layers"
        )


def layer_taps(inner: Settings, target: Target) -> tuple[int, ...]:
    """Taps of the ids that the settings name.

    Raises:
        FormatError: there are none, or the target has no such layers.
    """
    ids = inner.integers(IDS)
    if not ids:
        raise FormatError(f"{inner.where} lacks {IDS}, the layers whose outputs these heads read")
    if not all(0 <= i < target.num_layers - 1 for i in ids):
        raise FormatError(
            f"{inner.where}: {IDS} {list(ids)} must be 0 to {target.num_layers - 2}: the last layer's output is kept "
            "only after the final norm"
        )
    return tuple(i + 1 for i in ids)


FORMAT = Format("DFlash's block heads for vLLM and SGLang", write, recognises, read)
