"""The attention of a training unroll by PyTorch's FlexAttention, for GPUs: scores of rows × text are never in memory.

The committed rows go through the kernel, which also tells the log-sum-exp of its scores; the keys of a row's own steps,
one a step, are joined to its result by that. On a CPU the kernel has no backward pass, so it is refused for training.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def check_device(device: torch.device) -> None:
    """Refuse training where the kernel cannot.

    Raises:
        ValueError: it is not a GPU.
    """
    if device.type != "cuda":
        raise ValueError(f"flex attention has no backward pass on {device.type}: set train.attention to plain")


def attend_flex(q: Tensor, k0: Tensor, v0: Tensor, seen: Tensor, own: Sequence[tuple[Tensor, Tensor]] = ()) -> Tensor:
    """Attention of unroll rows, as ``heads.attention.attend_rows`` computes it.

    Shapes: q (B, heads, R, D), k0 and v0 (B, kv_heads, T, D), seen (B, R, T), own (B, kv_heads, R, D) each.

    Raises:
        ValueError: gradients are wanted on a CPU.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    if torch.is_grad_enabled() and any(part.requires_grad for part in (q, k0, v0)):
        check_device(q.device)
    b, heads, r, d = q.shape
    kv, t = k0.shape[1], k0.shape[2]

    def shown(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return seen[batch, row, column]

    mask = create_block_mask(shown, b, None, r, t, device=str(q.device))
    # rows that only fill a place see nothing: they get zeros, and a log-sum-exp of minus infinity
    out, lse = _kernel(q.device)(q, k0, v0, block_mask=mask, enable_gqa=kv != heads, return_lse=True)
    if not own:
        return out
    grouped = q.view(b, kv, heads // kv, r, d)
    scores = torch.stack([(grouped * k[:, :, None]).sum(-1) for k, _ in own], -1).reshape(b, heads, r, -1) * d**-0.5
    scores = scores.to(lse.dtype)
    whole = torch.cat([lse[..., None], scores], -1).logsumexp(-1, keepdim=True)
    read = out * (lse[..., None] - whole).exp().to(out.dtype)
    for step, (_, v) in enumerate(own):
        weight = (scores[..., step, None] - whole).exp().to(v.dtype)
        read = read + weight * v.repeat_interleave(heads // kv, 1)
    return read


@lru_cache(maxsize=4)
def _kernel(device: torch.device) -> Any:
    """Compiled where it is fused; as it stands on a CPU, where it serves to be compared."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if device.type == "cuda" else flex_attention
