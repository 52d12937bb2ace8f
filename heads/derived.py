"""Targets that are derived from a base model: with an adapter of PEFT on it, or its weights quantized as it is loaded.

Either is another target than the base: it says other things, and heads record which it was.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from heads.hub import one_message
from heads.identify import INT4_GROUP
from heads.identity import TargetIdentity
from heads.loading import load_model, load_tokenizer
from heads.target import Target

NF4_PACKED = 64, 32  # inputs and outputs of a layer, by which 4-bit weights are packed for processors with AVX512-BF16
HALF = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Scheme:
    """A way to quantize weights, and nothing but weights: a row's result must not depend on the rows beside it.

    Attributes:
        what: for people.
        package: what it needs.
        config: transformers' settings of it for a target that computes in a dtype.
    """

    what: str
    package: str
    config: Callable[[torch.dtype], Any]


def _torchao(name: str, **settings: Any) -> Any:
    import torchao.quantization as kinds
    from transformers import TorchAoConfig

    return TorchAoConfig(getattr(kinds, name)(**settings))


def _int4(dtype: torch.dtype) -> Any:
    from torchao.quantization import PerGroup

    return _torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=PerGroup(INT4_GROUP))  # type: ignore[attr-defined]


def _nf4(dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


SCHEMES: dict[str, Scheme] = {
    "int8": Scheme("8 bit, a scale a row", "torchao", lambda dtype: _torchao("Int8WeightOnlyConfig")),
    "int4": Scheme(f"4 bit, a scale each {INT4_GROUP} weights of a row", "torchao", _int4),
    "nf4": Scheme("4 bit in levels of a normal distribution, a scale each 64 weights", "bitsandbytes", _nf4),
}


def quantization_config(scheme: str, dtype: Any) -> Any:
    """transformers' settings for a scheme of ``SCHEMES``.

    Raises:
        ValueError: there is no such scheme, its package is missing, or it does not compute in ``dtype``.
    """
    if scheme not in SCHEMES:
        known = "; ".join(f"{name}: {each.what}" for name, each in SCHEMES.items())
        raise ValueError(f"there is no quantization {scheme!r} ({known})")
    found = SCHEMES[scheme]
    if dtype not in HALF:
        raise ValueError(f"{scheme} weights compute in bfloat16, float16 or float32, not in {dtype}: set target.dtype")
    if importlib.util.find_spec(found.package) is None:
        raise ValueError(
            f"{scheme} weights need the package {found.package}: pip install -e '.[{found.package}]' in the clone, "
            "or set target.quantization to none"
        )
    return found.config(dtype)


def put_adapter(model: Any, name: str, revision: str | None, **access: Any) -> Any:
    """The model with an adapter (a folder or Hub id) on it; ``access`` as of :func:`heads.loading.load_model`.

    Raises:
        ValueError: it is no LoRA, or it replaces whole modules, which heads could not tell from the base's.
        OSError: there is none of that name.
    """
    from peft import PeftConfig, PeftModel

    try:
        with one_message(name, access.get("token"), revision):
            config = PeftConfig.from_pretrained(name, revision=revision, **access)
        if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA":
            raise ValueError(f"{name} is a {config.peft_type} adapter: a target's adapter is a LoRA")
        if getattr(config, "modules_to_save", None):
            modules = ", ".join(config.modules_to_save)
            raise ValueError(f"{name} replaces {modules} of its base: merge it and name the merged model as the target")
        with one_message(name, access.get("token"), revision):
            return PeftModel.from_pretrained(model, name, revision=revision, **access)
    except RuntimeError as error:  # tensors that do not fit
        raise ValueError(f"the adapter {name} does not fit the target: {error}") from None


def _packed(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The 4-bit layers that bitsandbytes packs anew at their first pass, as it does on processors with AVX512-BF16."""
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if getattr(module, "support_avx512bf16_for_cpu", False) and weight is not None and weight.device.type == "cpu":
            yield name, module


def unpackable(model: nn.Module) -> str | None:
    """The first layer that packing would fail on, and its sizes; None for none."""
    inputs, outputs = NF4_PACKED
    for name, module in _packed(model):
        if module.in_features % inputs or module.out_features % outputs:
            return f"{name} has {module.in_features} and {module.out_features}"
    return None


@torch.no_grad()
def settle(model: nn.Module) -> None:
    """Have layers packed that would be at their first pass: it rounds their scales, and who a target is must not depend
    on whether it has been run."""
    for _, module in _packed(model):
        module(torch.zeros(1, module.in_features, dtype=getattr(module, "compute_dtype", None)))


def load(
    name: str,
    *,
    dtype: torch.dtype | Literal["auto"],
    device: torch.device | str = "cpu",
    revision: str | None = None,
    trust_remote_code: bool = False,
    adapter: str | None = None,
    adapter_revision: str | None = None,
    quantization: str | None = None,
    **access: Any,
) -> Target:
    """Load a target by the embedded one's name, a folder, or a Hub id, and derive what is asked for.

    Args:
        adapter: a LoRA to put on it, a folder or Hub id.
        quantization: a scheme of ``SCHEMES`` to quantize its weights by.
        access: how to reach both: ``token``, ``cache_dir``, ``local_files_only``.

    Raises:
        ValueError: see :func:`quantization_config`, :func:`put_adapter` and :func:`heads.loading.load_model`; layers
            of other sizes than its quantizer can use here.
    """
    how: dict[str, Any] = {"dtype": dtype, "revision": revision, "trust_remote_code": trust_remote_code, **access}
    if adapter is None and quantization is None:
        return Target.load(name, device=device, **how)
    if quantization is not None:
        how |= {"quantization_config": quantization_config(quantization, dtype), "device_map": device}
    model = load_model(Target.kind, name, **how)
    if quantization is None:
        model = model.to(device)
    elif (narrow := unpackable(model)) is not None:
        raise ValueError(
            f"{quantization} weights of {name} cannot be used on this processor, for which bitsandbytes packs them by "
            f"{NF4_PACKED[0]} inputs and {NF4_PACKED[1]} outputs: {narrow}. Set target.quantization to int4 or none"
        )
    settle(model)
    if adapter is not None:
        model = put_adapter(model, adapter, adapter_revision, **access)
    target = Target(model, name=str(name), adapter=None if adapter is None else (adapter, adapter_revision))
    target._read_tokenizer = partial(load_tokenizer, name, revision=revision, **access)
    return target


def recorded(identity: TargetIdentity, dtype: torch.dtype | Literal["auto"] | None, **access: Any) -> Target:
    """The target of a record; a quantized one in the dtype it was quantized in unless another is named.

    ``access`` is how to reach it: ``token``, ``cache_dir``, ``local_files_only``.

    Raises:
        ValueError: an adapter was on it of which only the weights' hash is known.
    """
    if identity.adapter and not identity.adapter_name:
        raise ValueError(
            f"the heads' target is {identity.name} with an adapter that was not loaded by name: load both yourself "
            "and pass the model as target"
        )
    scheme, _, stored = (identity.quantizer or "").partition("/")
    quantization = scheme if scheme in SCHEMES and stored else None
    own: Any = getattr(torch, stored, None) if quantization else torch.bfloat16  # what is no dtype, load refuses
    return load(
        identity.name,
        dtype=dtype or own,
        revision=identity.revision,
        adapter=identity.adapter_name,
        adapter_revision=identity.adapter_revision,
        quantization=quantization,
        **access,
    )
