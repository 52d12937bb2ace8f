"""Recognizing a target: what heads record of it, its adapter and its quantizer included."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from heads.identity import TargetIdentity, config_fields, hash_all, quantized_layer, sample_hash

if TYPE_CHECKING:
    from heads.target import Target

INT4_GROUP = 32  # weights of a row that share a scale, where 4-bit weights are made by heads/derived.py


def identify(target: Target) -> TargetIdentity:
    """What heads record of a target.

    Raises:
        ValueError: it is quantized so that its matrices cannot be asked what they hold.
    """
    if not isinstance(target.output.weight, Tensor):
        raise ValueError(
            f"{target.name} is quantized by {type(target.output).__module__}: heads cannot tell it by its rows"
        )
    layer = target.layers[target.num_layers // 2]
    # PEFT's wrapper calls ``generate`` of the model inside, which is the same target by shorter names
    adapter = {n.removeprefix("base_model.model."): p for n, p in target.model.named_parameters() if "lora_" in n}
    name, revision = target.adapter or (None, None)
    return TargetIdentity(
        name=target.name,
        revision=getattr(target.model.config, "_commit_hash", None),
        fields=config_fields(target.config),
        weights=sample_hash(target.embedding, layer, target.output, target.dtype),
        quantizer=_quantizer(target),
        adapter=hash_all((n, p.to(torch.bfloat16)) for n, p in adapter.items()) if adapter else None,
        adapter_name=name,
        adapter_revision=revision,
    )


def _quantizer(target: Target) -> str | None:
    """Name of how a target's weights are quantized."""
    config = getattr(target.model.config, "quantization_config", None)
    if config is None:
        held = quantized_layer(target.layers)
        return type(held).__name__ if held is not None else None
    method = getattr(config, "quant_method", config)
    method = str(getattr(method, "value", method))
    told = _TOLD.get(method)
    return method if told is None else f"{told(config)}/{str(target.dtype).removeprefix('torch.')}"


def _told_by_torchao(config: Any) -> str:
    kind = config.quant_type
    name = type(kind).__name__
    if name == "Int8WeightOnlyConfig":
        return "int8"
    group = getattr(getattr(kind, "granularity", None), "group_size", None)
    if name == "IntxWeightOnlyConfig" and str(kind.weight_dtype) == "torch.int4" and group == INT4_GROUP:
        return "int4"
    return f"torchao {name}"


def _told_by_bitsandbytes(config: Any) -> str:
    if not config.load_in_4bit:
        return "bitsandbytes int8"
    return config.bnb_4bit_quant_type + (" twice" if config.bnb_4bit_use_double_quant else "")


# methods that quantize as a model is loaded → the scheme
_TOLD: dict[str, Callable[[Any], str]] = {"torchao": _told_by_torchao, "bitsandbytes": _told_by_bitsandbytes}
