"""What training will need, before it is begun: bytes on disk to the byte, memory from short passes that are measured.

Memory of a pass does not follow from a formula that every kind of heads shares, so it is measured: three texts of
different lengths go forward and backward, and a quadratic through them (rows, and rows × rows of attention) says what
the largest micro-batch of the run takes.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LENGTHS = (64, 128, 256)

# the order of dtypes in a safetensors file, the last first
_ORDER = ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "F64", "I64")
_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.int32: "I32", torch.float32: "F32", torch.float64: "F64", torch.int64: "I64",
}  # fmt: skip


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors that share no memory."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def stored_bytes(
    tensors: Mapping[str, tuple[Sequence[int], torch.dtype]], metadata: dict[str, str] | None = None
) -> int:
    """Exact size of the safetensors file of these tensors."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name in sorted(tensors, key=lambda name: (-_ORDER.index(_NAMES[tensors[name][1]]), name)):
        shape, dtype = tensors[name]
        end = at + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return 8 + -(-len(text) // 8) * 8 + at


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are made inside it and still there.

    Attributes:
        now, peak: bytes, at this moment and at most.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note the memory its results stand in."""
        before = {_key(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and _key(tensor) not in before | self._known:
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)

        def gone() -> None:
            self._known.discard(key)
            self.now -= size

        weakref.finalize(storage, gone)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def peak_of(action: Callable[[], object], device: torch.device) -> int:
    """Bytes that ``action`` needs at most beyond what was there before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        action()
        return int(torch.cuda.max_memory_allocated(device) - before)
    with LiveBytes() as counted:
        action()
    return counted.peak


class PassMemory:
    """Bytes of a pass over (texts, padded length), from what passes over one text took.

    Args:
        measure: bytes of a pass over one text of a length.
    """

    def __init__(self, measure: Callable[[int], int], lengths: Sequence[int] = LENGTHS) -> None:
        took = [measure(length) for length in lengths]
        system = np.array([[1.0, length, length**2] for length in lengths])
        fixed, linear, square = np.linalg.lstsq(system, np.array(took, float), rcond=None)[0]
        self.fixed, self.linear, self.square = max(fixed, 0.0), linear, max(square, 0.0)

    def __call__(self, texts: int, length: int) -> int:
        """Bytes of a pass over so many texts, padded to so many tokens."""
        return round(self.fixed + texts * (self.linear * length + self.square * length**2))


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
