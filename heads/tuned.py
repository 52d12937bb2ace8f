"""Heads adapted by LoRA (arXiv 2106.09685) to other texts or to another target: only low-rank factors are trained.

While they are trained the heads hold both, W and B·A beside it, under PEFT's names; their config says so (``lora``).
Afterwards :func:`merge` gives ordinary heads; :mod:`heads.adapter` stores the factors alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from heads.base import DraftHeads
from heads.config import ConfigError, refuse_unknown
from heads.identity import TargetMismatch

DEFAULTS: dict[str, Any] = {"rank": 8, "alpha": 16.0, "modules": "all"}
NAME = "default"  # what PEFT calls a model's first adapter


def lora_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Complete settings: ``rank`` and ``alpha`` (the factors' product is scaled by alpha/rank), and ``modules``, names
    of linear layers as PEFT's ``target_modules`` takes them, or "all".

    Raises:
        ConfigError: an unknown name, or a value that cannot be.
    """
    refuse_unknown(given, DEFAULTS, "lora")
    made = DEFAULTS | dict(given)
    if type(made["rank"]) is not int or made["rank"] < 1:
        raise ConfigError(f"lora.rank must be 1 or more, not {made['rank']!r:.80}")
    if not isinstance(made["alpha"], (int, float)) or not made["alpha"] > 0:
        raise ConfigError(f"lora.alpha must be above 0, not {made['alpha']!r:.80}")
    return made


def adapt(heads: DraftHeads, given: Mapping[str, Any]) -> None:
    """Put fresh factors on the heads' linear layers, in place, and freeze all else; their output stays as it was.

    Raises:
        ConfigError: see :func:`lora_settings`; no layer has such a name; they are adapted already, or an adapter
            themselves.
    """
    if heads.config.lora is not None:
        raise ConfigError("these heads have an adapter on them already: merge it first")
    _refuse_adapter(heads)
    heads.config = replace(heads.config, lora=lora_settings(given))
    inject(heads)


def _refuse_adapter(heads: DraftHeads) -> None:
    """Refuse heads whose own weights are low-rank factors: another adapter's could not be told from them."""
    if factors(heads):
        raise ConfigError(f"{heads.config.kind} heads are an adapter themselves: train them further without heads.lora")


def inject(heads: DraftHeads) -> None:
    """The factors that ``heads.config.lora`` asks for, B at zero."""
    from peft import LoraConfig, inject_adapter_in_model  # takes a second, which only adapted heads need

    assert heads.config.lora is not None
    _refuse_adapter(heads)
    settings = lora_settings(heads.config.lora)
    linear = [name for name, module in heads.named_modules() if isinstance(module, nn.Linear)]
    wanted = linear if settings["modules"] == "all" else settings["modules"]
    dtype = next(heads.parameters()).dtype
    try:
        config = LoraConfig(r=settings["rank"], lora_alpha=settings["alpha"], target_modules=wanted)
        inject_adapter_in_model(config, heads)
    except ValueError as error:
        raise ConfigError(
            f"lora.modules {str(settings['modules'])[:80]} does not fit; layers are {', '.join(linear)}"
        ) from error
    heads.to(dtype)


def factors(heads: DraftHeads) -> dict[str, Tensor]:
    """The trained tensors by name, without PEFT's name for the adapter."""
    held = heads.state_dict()
    return {name.replace(f".{NAME}.", "."): tensor for name, tensor in held.items() if ".lora_" in name}


def base_tensors(heads: DraftHeads) -> dict[str, Tensor]:
    """The tensors of the heads below the adapter, under ordinary names."""
    held = heads.state_dict()
    return {name.replace(".base_layer.", "."): tensor for name, tensor in held.items() if ".lora_" not in name}


def without_adapter(heads: DraftHeads) -> DraftHeads:
    """Heads as they were before they were adapted; those without an adapter are given back."""
    return heads if heads.config.lora is None else _plain(heads, base_tensors(heads))


@torch.no_grad()
def merge(heads: DraftHeads) -> DraftHeads:
    """Ordinary heads that say the same, within rounding, in eval mode; heads without an adapter are given back."""
    if heads.config.lora is None:
        return heads
    tensors = base_tensors(heads)
    for name, module in heads.named_modules():
        if hasattr(module, "get_delta_weight"):
            weight = tensors[f"{name}.weight"]
            delta: Tensor = module.get_delta_weight(NAME)
            tensors[f"{name}.weight"] = weight + delta.to(weight)
    return _plain(heads, tensors)


def _plain(heads: DraftHeads, tensors: dict[str, Tensor]) -> DraftHeads:
    from heads.kinds import build

    first = next(iter(heads.parameters()))
    plain = build(replace(heads.config, lora=None), heads.target, check=False).to(first.device, first.dtype)
    plain.load_state_dict(tensors)
    return plain.eval()


def start_from(path: str, target: Any, dtype: torch.dtype, *, allow_mismatch: bool) -> DraftHeads:
    """Existing heads to train further, as of ``target`` from now on.

    Raises:
        TargetMismatch: they are another target's, unless ``allow_mismatch``; says how to allow it in a recipe.
    """
    from heads.store import load

    try:
        heads = load(path, target, dtype=dtype, allow_mismatch=allow_mismatch)
    except TargetMismatch as error:
        hint = str(error).partition(". Load the target")[0]
        raise TargetMismatch(f"heads.init {path}: {hint}. To adapt them, set heads.allow_mismatch to true") from None
    heads.config = replace(heads.config, target=target.identity())
    return heads
