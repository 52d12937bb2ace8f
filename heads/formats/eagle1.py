"""EAGLE-1 and 2: one Llama layer without input norm and final norm, under the target's own output matrix.

Engines differ in what they expect: vLLM wraps a base architecture and has no bias on ``fc``, SGLang has an architecture
of its own and wants one. Without an engine the folder is as EAGLE's own project reads it. A reduced draft vocabulary
has no place in the form and needs none, since no weight hangs on it: engines draft over all tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from heads.base import DraftHeads
from heads.formats.checkpoint import Checkpoint
from heads.formats.compare import EMBEDDING, check_embedding
from heads.formats.dflash import check_embedding_is_bare
from heads.formats.eagle_layer import PARTS as LAYER
from heads.formats.eagle_layer import layer_config, shape, theta
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

NAME, PREFIX = "eagle1", "layers.0"
PARTS = {ours: theirs for ours, theirs in LAYER.items() if ours not in ("input_layernorm", "hidden_norm")}
REFUSED = {
    "attention_bias": "attention has no biases here",
    "mlp_bias": "the feed-forward part has no biases here",
}
ARCHITECTURES = {None: "LlamaForCausalLM", "vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}


def names(bias: bool) -> dict[str, str]:
    """Our tensor → theirs."""
    return {
        **{name: name for name in ("fc.weight", "fc.bias")[: 1 + bias]},
        **{f"layer.{ours}.weight": f"{PREFIX}.{theirs}" for ours, theirs in PARTS.items()},
    }


def write(heads: DraftHeads, request: Request) -> Files:
    """The folder.

    Raises:
        FormatError: other heads than EAGLE-1, or a bias for vLLM, or a target that scales its embeddings.
    """
    only_kind(heads, "eagle1", NAME, "EAGLE-1 and 2 are one layer without norms that regresses the target's state")
    engine_of(request, ENGINES, NAME)
    check_embedding_is_bare(heads)
    state, bias = heads.state_dict(), bool(heads.config.options["bias"])
    if bias and request.engine == "vllm":
        raise FormatError("vLLM's EAGLE layer has no bias on fc: train with heads.options.bias false, or for sglang")
    held = {theirs: stored(state[ours], request.dtype) for ours, theirs in names(bias).items()}
    if request.engine == "sglang" and not bias:
        held["fc.bias"] = torch.zeros(heads.config.hidden_size, dtype=request.dtype)
    config = layer_config(heads) | {
        "architectures": [ARCHITECTURES[request.engine]],
        "bias": "fc.bias" in held,
        "torch_dtype": str(request.dtype).removeprefix("torch."),
    }
    size = heads.config.draft_vocab_size
    notes = () if size is None else (f"the draft vocabulary of {size} stays behind: engines draft over all tokens",)
    fits: dict[str | None, tuple[str, ...]] = {None: () if bias else ("vllm",)}
    return Files(config, "model.safetensors", held, fits.get(request.engine, (str(request.engine),)), notes)


def recognises(checkpoint: Checkpoint) -> bool:
    """``fc`` from 2H to H above a layer that norms only behind its attention."""
    fc = checkpoint.entries.get("fc.weight")
    return (
        fc is not None
        and len(fc.shape) == 2
        and fc.shape[1] == 2 * fc.shape[0]
        and "norm.weight" not in checkpoint.entries
    )


def read(checkpoint: Checkpoint, target: Target, choice: Choice) -> Plan:
    """The plan of EAGLE-1 or 2 heads; whether ``fc`` has a bias is told by the tensors, not by the config.

    Raises:
        FormatError: the checkpoint does what our kind cannot, or its fields and tensors disagree.
    """
    settings = Settings.of(checkpoint.config, checkpoint.path)
    for key, reason in REFUSED.items():
        if settings.flag(key, False):
            raise FormatError(f"{settings.where}: {key} is true, and these heads cannot be imported: {reason}")
    if any(name.startswith("layers.1.") for name in checkpoint.entries):
        raise FormatError(f"{checkpoint.path} has more than one decoder layer: heads of kind eagle1 have one")
    width, _ = checkpoint.shape("fc.weight", 2)
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    told = {key: settings.whole(key, own) for key, own in sizes.items()} | {"fc.weight": width}
    if told != sizes | {"fc.weight": target.hidden_size}:
        raise FormatError(
            f"{checkpoint.path}: hidden_size is {told['hidden_size']} in its config and {width} in fc.weight, "
            f"vocab_size {told['vocab_size']}; {target.name} has {target.hidden_size} and {target.vocab_size}"
        )
    check_embedding(checkpoint, target)
    bias = "fc.bias" in checkpoint.entries
    options: dict[str, Any] = {
        "bias": bias,
        "rope_theta": theta(settings, 10000.0),
        "rms_norm_eps": settings.number("rms_norm_eps", 1e-6),
    }
    return Plan(
        kind="eagle1",
        lookahead=choice.lookahead,
        taps=(target.num_layers,),
        options=shape(checkpoint, settings, PREFIX, width) | options,
        names=names(bias),
        also=frozenset({EMBEDDING} & checkpoint.entries.keys()),
    )


FORMAT = Format("EAGLE-1 and 2", write, recognises, read)
