"""A target that is only a configuration: what training on it would need, without its weights and without its memory.

Its weights, and whatever is computed from them, are tensors on PyTorch's meta device: shapes and dtypes, no numbers.
Which rows are trained does hang on numbers (masks, positions, token ids), so everything whole or boolean stays real, on
the processor, and the two are let meet by :class:`SizesOnly`. Attention is not fused there, so that memory of the
target's passes is an upper bound, and autocast is not known, so that the heads' activations count in float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AutoConfig, AutoModelForCausalLM

from heads.identity import TargetIdentity, config_fields
from heads.target import Target
from train.config import TargetConfig

META = torch.device("meta")
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.index.json")
# operations that make a tensor of no other tensor's numbers, or of one that is moved
MADE = {
    "arange", "full", "zeros", "ones", "empty", "scalar_tensor", "rand", "randint", "randperm", "_to_copy", "full_like",
    "zeros_like", "ones_like", "empty_like", "new_full", "new_zeros", "new_ones", "new_empty",
}  # fmt: skip
RANDOM = {"rand", "randint", "randperm"}
INDEXED = {"index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put"}


def is_outline(name: str) -> bool:
    """Whether a target's name is that of a configuration alone: a JSON file, or a folder without weights."""
    path = Path(name)
    if path.is_dir():
        return (path / "config.json").is_file() and not any(any(path.glob(kind)) for kind in WEIGHTS)
    return path.suffix == ".json" and path.is_file()


class Outline(Target):
    """A target without numbers."""

    def identity(self) -> TargetIdentity:
        """Of the configuration alone."""
        return TargetIdentity(self.name, None, config_fields(self.config), "none: a configuration alone")

    def self_check(self) -> None:
        """There are no logits to compare."""

    def tokenizer(self) -> Any:
        """There is none.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"{self.name} is a configuration alone and has no tokenizer: name prepared conversations in data.train and "
            "data.heldout (headstart data prepare, with any target's tokenizer)"
        )


def outline(settings: TargetConfig) -> Outline:
    """The target of a configuration.

    Raises:
        ValueError: it is no configuration of a model that transformers knows, or it is to be adapted or quantized.
    """
    path = Path(settings.name)
    if settings.adapter or settings.quantization != "none":
        raise ValueError(f"{settings.name} is a configuration alone: it cannot be adapted or quantized")
    file = path / "config.json" if path.is_dir() else path
    try:
        config = AutoConfig.for_model(**json.loads(file.read_text(encoding="utf-8")))
    except (KeyError, TypeError, ValueError) as wrong:
        raise ValueError(f"{file} is no configuration of a model that transformers knows: {wrong}") from None
    with META:
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, settings.dtype))
    model.requires_grad_(False)
    return Outline(model, name=settings.name)


class SizesOnly(TorchDispatchMode):
    """Lets meta tensors meet real ones: what comes out is meta.

    A single number that is asked of a meta tensor is 1. Whole and boolean tensors that would be made on the meta device
    are made on the processor, and so are random ones, which masks are drawn by.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operation."""
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name == "_local_scalar_dense" and args[0].device == META:
            return torch.ones((), dtype=args[0].dtype, device="cpu").item()
        made = name in MADE and kwargs.get("device") == META and not self._numbers(name, args, kwargs)
        alike = name.endswith("_like") and args[0].device == META and kwargs.get("dtype") in (torch.bool, torch.int64)
        if made or alike:
            kwargs["device"] = torch.device("cpu")
        meta = any(tensor.device == META for tensor in tensors)
        if meta and any(tensor.device != META for tensor in tensors):
            return self._met(func, name, args, kwargs)
        return func(*args, **kwargs)

    @staticmethod
    def _numbers(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether what is made holds floating-point numbers that stand for weights or states."""
        if name in RANDOM:
            return False
        source = args[0] if args and isinstance(args[0], Tensor) else None
        dtype = kwargs.get("dtype") or (source.dtype if source is not None else None)
        if dtype is None:
            filled = args[-1] if name in ("arange", "full", "scalar_tensor") and args else 1.0
            return isinstance(filled, float)
        return bool(dtype.is_floating_point)

    @staticmethod
    def _met(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        changed = args[0] if name.endswith("_") and isinstance(args[0], Tensor) else None
        if changed is not None and changed.device != META:  # real numbers that are written over by unknown ones

            def real(leaf: Any) -> Any:
                unknown = isinstance(leaf, Tensor) and leaf.device == META
                return torch.zeros(leaf.shape, dtype=leaf.dtype, device="cpu") if unknown else leaf

            return func(*tree_map(real, args), **tree_map(real, kwargs))
        if name in INDEXED:  # a mask says how many rows there are, which only its numbers tell
            places: list[Any] = []
            for index in args[1]:
                mask = isinstance(index, Tensor) and index.dtype == torch.bool
                places += list(index.nonzero(as_tuple=True)) if mask else [index]
            args = (args[0], places, *args[2:])

        def without(leaf: Any) -> Any:
            known = isinstance(leaf, Tensor) and leaf.device != META
            return torch.empty_like(leaf, device=META) if known else leaf

        return func(*tree_map(without, args), **tree_map(without, kwargs))
