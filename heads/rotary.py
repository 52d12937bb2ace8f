"""Rotary position embedding (arXiv 2104.09864), in the half-split layout of Llama checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(positions: Tensor, dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines (B, 1, n, dim) for positions (B, n); angles are computed in float32 or better."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    inverse = theta ** -(torch.arange(0, dim, 2, dtype=exact, device=positions.device) / dim)
    angles = positions[:, None, :, None].to(exact) * inverse
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate queries or keys (B, heads, n, dim)."""
    cos, sin = rotation
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin
