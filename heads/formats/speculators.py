"""EAGLE-3 in vLLM's ``speculators`` form: the layer's settings nested, the target named, its embedding beside it."""

from __future__ import annotations

from typing import Any

from heads.base import DraftHeads
from heads.eagle import Eagle
from heads.formats.checkpoint import Checkpoint
from heads.formats.eagle3 import IDS
from heads.formats.eagle_layer import check_taps, layer_config, plan, tensors
from heads.formats.format import Choice, Files, Format, FormatError, Plan, Request, engine_of, only_kind, stored
from heads.formats.settings import Settings
from heads.target import Target

NAME, VERSION = "speculators", "0.9.0"


def write(heads: DraftHeads, request: Request) -> Files:
    """The folder.

    Raises:
        FormatError: other heads than EAGLE-3, or taps that vLLM does not capture.
    """
    only_kind(heads, "eagle", NAME, "its eagle3 is one decoder layer over fused taps, which these are not")
    engine_of(request, ["vllm"], NAME)
    check_taps(heads)
    own, target = heads.config, heads.target
    embedding = target.embedding.weight
    if embedding.shape != (own.vocab_size, own.hidden_size):
        raise FormatError(
            f"{target.name} embeds {embedding.shape[0]} tokens and answers {own.vocab_size}: this form has one size"
        )
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "torch_dtype": str(request.dtype).removeprefix("torch."),
        "draft_vocab_size": own.draft_vocab_size or own.vocab_size,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": bool(own.options["fc_norm"]),
        "norm_output": bool(own.options["norm_output"]),
        "embed_requires_grad": False,
        "target_hidden_size": own.hidden_size,
        IDS: list(own.taps),
        "transformer_layer_config": layer_config(heads),
        "speculators_config": _proposals(heads, request.target_name),
    }
    held = tensors(heads, "layers.0", request.dtype) | {"embed_tokens.weight": stored(embedding, request.dtype)}
    return Files(config, "model.safetensors", held, ("vllm",))


def _proposals(heads: DraftHeads, target_name: str) -> dict[str, Any]:
    model = heads.target.model
    return {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": heads.config.lookahead,
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "verifier": {
            "name_or_path": target_name,
            "architectures": getattr(model.config, "architectures", None) or [type(model).__name__],
        },
    }


def recognises(checkpoint: Checkpoint) -> bool:
    """Its config says so."""
    return "speculators_model_type" in checkpoint.config


def read(checkpoint: Checkpoint, target: Target, choice: Choice) -> Plan:
    """The plan of a speculators checkpoint.

    Raises:
        FormatError: another algorithm than eagle3, and see :func:`heads.formats.eagle_layer.plan`.
    """
    settings = Settings.of(checkpoint.config, checkpoint.path)
    if (algorithm := settings.text("speculators_model_type", "")) != "eagle3":
        raise FormatError(f"{settings.where}: speculators_model_type is {algorithm!r}, only 'eagle3' can be imported")
    if "norm_before_residual" not in settings:
        raise FormatError(
            f"{settings.where} lacks norm_before_residual, and means true without it, which heads of kind "
            "eagle cannot do"
        )
    layer = settings.part("transformer_layer_config")
    if (kind := layer.text("model_type", "llama")) != "llama":  # qwen3's norms queries and keys
        raise FormatError(f"{layer.where}: model_type is {kind!r}, only 'llama' layers can be imported")
    taps = settings.integers(IDS) or Eagle.default_taps(target)
    return plan(checkpoint, target, settings, layer, taps, choice.lookahead or _proposed(settings))


def _proposed(settings: Settings) -> int | None:
    """How many tokens deep it was made to draft."""
    methods = settings.part("speculators_config").values.get("proposal_methods")
    if not isinstance(methods, list) or not methods or not isinstance(methods[0], dict):
        return None
    return Settings(methods[0], f"proposal_methods in {settings.where}").whole("speculative_tokens", 5)


FORMAT = Format("EAGLE-3 as vLLM's speculators store it", write, recognises, read)
