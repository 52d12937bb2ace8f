"""Attention of heads: many rows of a text at once, as in training, and what is drafted now."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def attend_rows(q: Tensor, k0: Tensor, v0: Tensor, seen: Tensor, own: Sequence[tuple[Tensor, Tensor]] = ()) -> Tensor:
    """Attention of unroll rows: committed keys that ``seen`` (B, R, T) shows, and one own key a later step.

    Shapes: q (B, heads, R, D), k0 and v0 (B, kv_heads, T, D), own (B, kv_heads, R, D) each. Query heads are
    grouped over their key head instead of repeating keys; the softmax is float32.
    """
    b, heads, r, d = q.shape
    kv = k0.shape[1]
    grouped = q.view(b, kv, heads // kv, r, d) * d**-0.5
    scores = torch.einsum("bkgrd,bktd->bkgrt", grouped, k0)
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    if own:
        diagonals = torch.stack([(grouped * k[:, :, None]).sum(-1) for k, _ in own], -1)
        scores = torch.cat([scores, diagonals], -1)
    weights = scores.float().softmax(-1).to(q.dtype) if q.dtype != torch.float64 else scores.softmax(-1)
    t = k0.shape[2]
    read = torch.einsum("bkgrt,bktd->bkgrd", weights[..., :t], v0)
    for step, (_, v) in enumerate(own):
        read = read + weights[..., t + step, None] * v[:, :, None]
    return read.reshape(b, heads, r, d)


def attend_stored(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of (1, heads, n, D) queries over (1, kv_heads, L, D), all visible or as ``mask`` (n, L) shows."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
