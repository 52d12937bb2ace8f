"""EAGLE-3 in the flat form that vLLM and SGLang load: one Llama layer under ``midlayer``, no ``model.`` prefix.

Both engines take the inputs of layers 2, n/2 and n - 3 when the config names none, so that one folder is right in
both. Named ones are counted differently: vLLM's id is transformers' index of the hidden state, SGLang's is one less.
"""

from __future__ import annotations

from heads.base import DraftHeads
from heads.eagle import Eagle
from heads.formats.checkpoint import Checkpoint
from heads.formats.eagle_layer import PORTABLE_LAYERS, check_taps, layer_config, plan, tensors
from heads.formats.format import ENGINES, Choice, Files, Format, FormatError, Plan, Request, engine_of, only_kind
from heads.formats.settings import Settings
from heads.target import Target

NAME = "eagle3"
IDS = "eagle_aux_hidden_state_layer_ids"
SHIFT = {"vllm": 0, "sglang": 1}  # our tap minus the engine's id


def write(heads: DraftHeads, request: Request) -> Files:
    """The flat folder.

    Raises:
        FormatError: other heads than EAGLE-3, or taps that no engine, or not every engine, captures.
    """
    only_kind(heads, "eagle", NAME, "EAGLE-3 is one decoder layer over fused taps, which these are not")
    engine_of(request, ENGINES, NAME)
    own, config = heads.config, layer_config(heads)
    config = {"architectures": ["LlamaForCausalLMEagle3"], **config}
    config |= {
        "torch_dtype": str(request.dtype).removeprefix("torch."),
        "draft_vocab_size": own.draft_vocab_size or own.vocab_size,  # SGLang reads it whether reduced or not
        "norm_before_residual": False,
    }
    config |= {key: True for key in ("fc_norm", "norm_output") if own.options[key]}
    engines: tuple[str, ...] = ENGINES
    if not _usual(heads):
        check_taps(heads)
        engines = (_named(heads, request),)
        ids = [tap - SHIFT[engines[0]] for tap in own.taps]
        config["eagle_config"] = {IDS: ids, "use_aux_hidden_state": True, "norm_before_fc": False}
        if len(ids) != 3:
            config["num_aux_hidden_states"] = len(ids)
    return Files(config, "model.safetensors", tensors(heads, "midlayer", request.dtype), engines)


def _usual(heads: DraftHeads) -> bool:
    n = heads.target.num_layers
    return n >= PORTABLE_LAYERS and heads.config.taps == Eagle.default_taps(heads.target)


def _named(heads: DraftHeads, request: Request) -> str:
    taps, n = list(heads.config.taps), heads.target.num_layers
    if request.engine is None:
        raise FormatError(
            f"taps {taps} of a target of {n} layers are not what the engines take by default, and they count named "
            "ones differently (by one): say --engine vllm or --engine sglang, one folder each"
        )
    if request.engine == "sglang" and len(taps) == 1:
        raise FormatError(
            f"SGLang leaves out fc where a single state is tapped ({taps}): export for vllm, or tap three"
        )
    return request.engine


def recognises(checkpoint: Checkpoint) -> bool:
    """A layer that norms the state beside the embedding."""
    return any(f"{prefix}.hidden_norm.weight" in checkpoint.entries for prefix in ("midlayer", "layers.0"))


def read(checkpoint: Checkpoint, target: Target, choice: Choice) -> Plan:
    """The plan of a flat checkpoint.

    Raises:
        FormatError: see :func:`heads.formats.eagle_layer.plan`; or its taps cannot be told.
    """
    settings = Settings.of(checkpoint.config, checkpoint.path)
    inner = settings.part("eagle_config")
    for key, wanted in {"norm_before_fc": False, "use_aux_hidden_state": True}.items():
        if inner.flag(key, wanted) != wanted:
            raise FormatError(f"{inner.where}: {key} is {not wanted}, which heads of kind eagle cannot do")
    ids = inner.integers(IDS) or settings.integers(IDS)
    return plan(checkpoint, target, settings, settings, _taps(settings, ids, target, choice), choice.lookahead)


def _taps(settings: Settings, ids: tuple[int, ...], target: Target, choice: Choice) -> tuple[int, ...]:
    if not ids:
        return Eagle.default_taps(target)
    if choice.engine is None:
        raise FormatError(
            f"{settings.where} names the layers {list(ids)}, which are hidden states {list(ids)} for vLLM and "
            f"{[i + 1 for i in ids]} for SGLang: say --engine vllm or --engine sglang, for which it was made"
        )
    return tuple(i + SHIFT[choice.engine] for i in ids)


FORMAT = Format("EAGLE-3 for vLLM and SGLang", write, recognises, read)
