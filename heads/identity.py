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


class TargetMismatch(ValueError):
    """Heads meet a target they were not trained on."""


@dataclass(frozen=True)
class TargetIdentity:
    """A target's record.

    Attributes:
        name: Hub id, folder or the embedded target's name; for people and for loading, not compared.
        revision: Hub commit, where known.
        fields: the configuration's fields named in ``FIELDS`` (those the model has).
        weights: hash of bf16 values of fixed rows of embedding, middle layer and output matrix.
        quantizer: quantization method, None for plain weights.
        adapter: hash of the adapter's own weights, None without one.
    """

    name: str
    revision: str | None
    fields: dict[str, Any]
    weights: str
    quantizer: str | None = None
    adapter: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As stored in config.json."""
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> TargetIdentity:
        """From config.json.

        Raises:
            ValueError: a field is missing or unknown.
        """
        known = {field.name for field in fields(cls)}
        if set(stored) != known:
            raise ValueError(
                f"the heads' config has a target record with missing fields {sorted(known - set(stored))} "
                f"and unknown fields {sorted(set(stored) - known)}"
            )
        return cls(**stored)

    def differences(self, other: TargetIdentity) -> list[str]:
        """What differs, one readable piece each; empty when it is the same target."""
        pieces = [
            f"{key} {self.fields.get(key)!r} there, {other.fields.get(key)!r} here"
            for key in sorted(self.fields.keys() | other.fields.keys())
            if self.fields.get(key) != other.fields.get(key)
        ]
        for key in ("quantizer", "adapter"):
            if getattr(self, key) != getattr(other, key):
                pieces.append(f"{key} {getattr(self, key)!r} there, {getattr(other, key)!r} here")
        if not pieces and self.weights != other.weights:
            pieces.append(f"same shape but other weights ({self.weights[:12]}… there, {other.weights[:12]}… here)")
        return pieces


def config_fields(config: Any) -> dict[str, Any]:
    """The identity's fields of a text configuration, those that are set."""
    return {key: getattr(config, key) for key in FIELDS if getattr(config, key, None) is not None}


def sample_hash(embedding: Tensor, layer: nn.Module, output: Tensor) -> str:
    """Hash of fixed rows: spread rows of embedding and output matrix, first rows of one layer's matrices."""
    digest = hashlib.sha256()
    for matrix in (embedding, output):
        spread = torch.linspace(0, matrix.shape[0] - 1, ROWS).long()
        digest.update(_bytes(matrix[spread.to(matrix.device)]))
    for _, weight in sorted(_base_weights(layer)):
        digest.update(_bytes(weight[:ROWS]))
    return digest.hexdigest()


def hash_all(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Hash of every value as it is stored: for asserting that nothing changed."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _base_weights(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The layer's own matrices under their plain names; an adapter's are left out (PEFT wraps as ``base_layer``)."""
    for name, weight in layer.named_parameters():
        if "lora_" in name or weight.dim() < 2:
            continue
        if not weight.is_floating_point():
            raise ValueError(
                f"the target's {name} is stored as {weight.dtype}: quantized targets are not supported yet"
            )
        yield name.replace("base_layer.", ""), weight


def _bytes(weight: Tensor) -> bytes:
    return weight.detach().cpu().to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()
