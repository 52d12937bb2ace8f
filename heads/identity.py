"""Who a target is: what a heads folder records so that heads are never run on another model unnoticed.

Names and paths move and dtypes change, so identity is taken from the configuration's shape-giving fields and
from a hash of a few rows of weights rounded to bf16, which loading in another dtype leaves as it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "sliding_window",
)
ROWS = 8
OPTIONAL = ("revision", "quantizer", "adapter", "adapter_name", "adapter_revision")
LATER = {"adapter_name", "adapter_revision"}  # fields that are only stored where they say something


class TargetMismatch(ValueError):
    """Heads meet a target they were not trained on."""


@dataclass(frozen=True)
class TargetIdentity:
    """A target's record.

    Attributes:
        name: Hub id, folder or the embedded target's name; for people and for loading, not compared.
        revision: Hub commit, where known.
        fields: the configuration's fields named in ``FIELDS`` (those the model has).
        weights: hash of bf16 values of fixed rows of embedding, middle layer and output matrix; of a quantized target
            two, ``PLAIN-ALL``: of what its quantizer left as it was, and of that with what it did not.
        quantizer: quantization method, ``SCHEME/DTYPE`` where weights were quantized as they were loaded, which goes
            by the dtype they were loaded in; None for plain weights.
        adapter: hash of the adapter's own weights, None without one.
        adapter_name, adapter_revision: folder or Hub id and commit of the adapter, for people and for loading.
    """

    name: str
    revision: str | None
    fields: dict[str, Any]
    weights: str
    quantizer: str | None = None
    adapter: str | None = None
    adapter_name: str | None = None
    adapter_revision: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As stored in config.json; an adapter's name only where there is one."""
        return {key: value for key, value in asdict(self).items() if value is not None or key not in LATER}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> TargetIdentity:
        """From config.json.

        Raises:
            ValueError: a field is missing or unknown.
        """
        known = {field.name for field in fields(cls)}
        missing, unknown = sorted(known - set(stored) - LATER), sorted(set(stored) - known)
        if missing or unknown:
            raise ValueError(
                f"the heads' config has a target record with missing fields {missing} and unknown fields {unknown}"
            )
        for key, value in stored.items():
            optional = value is None and key in OPTIONAL
            fits = isinstance(value, dict) if key == "fields" else isinstance(value, str) and value.isprintable()
            if not optional and not fits:
                raise ValueError(f"the heads' config has a target record whose {key} is {value!r:.80}")
        return cls(**stored)

    def differences(self, other: TargetIdentity) -> list[str]:
        """What differs, one readable piece each; empty when it is the same target."""
        pieces = [
            f"{key} {self.fields.get(key)!r} there, {other.fields.get(key)!r} here"
            for key in sorted(self.fields.keys() | other.fields.keys())
            if self.fields.get(key) != other.fields.get(key)
        ]
        ours, theirs = self.quantizer or "", other.quantizer or ""
        if ours.partition("/")[0] != theirs.partition("/")[0]:
            pieces.append(f"quantizer {self.quantizer!r} there, {other.quantizer!r} here")
        if self.adapter != other.adapter:
            pieces.append(f"adapter {self._adapter()} there, {other._adapter()} here")
        # quantized in two dtypes, the same weights are rounded otherwise: then what is plain decides
        wanted, found = (one.weights if ours == theirs else one.weights.partition("-")[0] for one in (self, other))
        if not pieces and wanted != found:
            pieces.append(f"same shape but other weights ({wanted[:12]!r}… there, {found[:12]!r}… here)")
        return pieces

    def _adapter(self) -> str:
        return repr(self.adapter and self.adapter[:12]) + (f" ({self.adapter_name})" if self.adapter_name else "")


def config_fields(config: Any) -> dict[str, Any]:
    """The identity's fields of a text configuration, those that are set."""
    return {key: getattr(config, key) for key in FIELDS if getattr(config, key, None) is not None}


def sample_hash(embedding: nn.Module, layer: nn.Module, output: nn.Module, dtype: torch.dtype) -> str:
    """Hash of fixed rows: spread rows of embedding and output matrix, first rows of one layer's matrices.

    Where a quantizer holds matrices in a form of its own, what they make of unit vectors in ``dtype`` stands for them;
    then the hash is two, see :class:`TargetIdentity`.
    """
    digest, quantized = hashlib.sha256(), list[tuple[str, nn.Module]]()
    for module in (embedding, output):
        weight: Any = module.weight
        if is_plain(weight):
            spread = torch.linspace(0, weight.shape[0] - 1, ROWS).long()
            digest.update(_bytes(weight[spread.to(weight.device)]))
        else:
            quantized.append(("", module))
    quantized += sorted(_quantized(layer), key=lambda pair: pair[0])
    for _, weight in sorted(_base_weights(layer, least=1 if quantized else 2), key=lambda pair: pair[0]):
        digest.update(_bytes(weight[:ROWS]))
    plain = digest.hexdigest()
    for _, module in quantized:
        digest.update(_bytes(_answers(module, dtype)))
    return f"{plain}-{digest.hexdigest()}" if quantized else plain


def is_plain(weight: Any) -> bool:
    """Whether a weight is an ordinary matrix, not one in a quantizer's own form."""
    return type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point()


def quantized_layer(layer: nn.Module) -> nn.Module | None:
    """A linear module whose weights a quantizer holds, None where there is none."""
    return next((module for _, module in _quantized(layer)), None)


def _quantized(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in layer.named_modules():
        weight = getattr(module, "weight", None)
        linear = hasattr(module, "in_features") and isinstance(weight, Tensor)
        if linear and "lora_" not in name and not hasattr(module, "base_layer") and not is_plain(weight):
            yield name.replace("base_layer.", "").removesuffix(".base_layer"), module


@torch.no_grad()
def _answers(module: nn.Module, dtype: torch.dtype) -> Tensor:
    """What a linear module makes of the first unit vectors: columns of its matrix, however it is stored."""
    unit = torch.eye(ROWS, module.in_features, dtype=dtype, device=module.weight.device)  # type: ignore[call-overload]
    return module(unit)


class Hash:
    """SHA-256 of tensors by name, as they are stored; they are given one at a time, in the order of their names."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one in."""
        self._digest.update(name.encode())
        for part in _parts(tensor.detach()):
            self._digest.update(part.cpu().contiguous().view(torch.uint8).numpy().tobytes())

    def hex(self) -> str:
        """Of all so far."""
        return self._digest.hexdigest()


def hash_all(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Hash of every value as it is stored: for asserting that nothing changed."""
    digest = Hash()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        digest.add(name, tensor)
    return digest.hex()


def _parts(tensor: Any) -> Iterator[Tensor]:
    """The ordinary tensors that a quantizer's own kind of tensor is made of, or the tensor itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor.reshape(-1)
        return
    for name in tensor.__tensor_flatten__()[0]:
        if isinstance(getattr(tensor, name), Tensor):
            yield from _parts(getattr(tensor, name))


def _base_weights(layer: nn.Module, least: int) -> Iterator[tuple[str, Tensor]]:
    """The layer's plain weights of at least so many dimensions under their plain names; an adapter's are left out
    (PEFT wraps as ``base_layer``)."""
    for name, weight in layer.named_parameters():
        if "lora_" not in name and weight.dim() >= least and is_plain(weight):
            yield name.replace("base_layer.", ""), weight


def _bytes(weight: Tensor) -> bytes:
    return weight.detach().cpu().to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()
