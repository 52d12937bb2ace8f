"""How the target's states are rounded and laid out, on disk, on their way between processes and online alike.

Taps may be kept as eight-bit numbers, each tap of a token with a scale of its own (its largest value becomes the
format's largest). The state that the target's logits are computed from is never kept in fewer than sixteen bits: what
the target says is judged from it, and eight bits would move the judgement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max  # 448; it has no infinity, what is larger becomes NaN


@dataclass(frozen=True)
class Storage:
    """Columns of one token's states.

    Attributes:
        taps: how many.
        hidden_size: values of one.
        dtype: what taps are rounded to.
    """

    taps: int
    hidden_size: int
    dtype: torch.dtype

    @property
    def value_dtype(self) -> torch.dtype:
        """What training reads: the storage dtype, bfloat16 where that has eight bits."""
        return torch.bfloat16 if self.dtype == FP8 else self.dtype

    @property
    def columns(self) -> dict[str, tuple[int, torch.dtype]]:
        """Name → values a token, dtype."""
        scales = {"scales": (self.taps, torch.float32)} if self.dtype == FP8 else {}
        return {
            "taps": (self.taps * self.hidden_size, self.dtype),
            **scales,
            "hidden": (self.hidden_size, self.value_dtype),
            "top": (1, torch.int32),
            "lse": (1, torch.float32),
        }

    @property
    def token_bytes(self) -> int:
        """Size of one token's states."""
        return sum(width * dtype.itemsize for width, dtype in self.columns.values())

    def encode(self, taps: Tensor, hidden: Tensor) -> dict[str, Tensor]:
        """Rounded columns of taps (…, taps·H) and post-norm hidden states (…, H)."""
        kept = {"hidden": hidden.to(self.value_dtype)}
        if self.dtype != FP8:
            return {"taps": taps.to(self.dtype), **kept}
        each = taps.float().unflatten(-1, (self.taps, self.hidden_size))
        largest = each.abs().amax(-1)
        scales = torch.where(largest > 0, largest / FP8_MAX, 1.0)
        rounded = (each / scales[..., None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        return {"taps": rounded.flatten(-2), "scales": scales, **kept}

    def decode(self, columns: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Taps (…, taps·H) and hidden states (…, H) as training reads them."""
        taps = columns["taps"]
        if self.dtype == FP8:
            each = taps.to(self.value_dtype).unflatten(-1, (self.taps, self.hidden_size))
            taps = (each * columns["scales"][..., None]).to(self.value_dtype).flatten(-2)
        return taps, columns["hidden"]
