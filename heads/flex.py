"""Attention of the training unroll by torch's fused kernel (FlexAttention, arXiv 2412.05496), for GPUs.

Scores of rows × text are never held, which is what limits length otherwise. The kernel knows nothing of the one own key
that a row has from each later step; these are put beside its result by the log-sum-exp that it also gives::

    read = (e^lse · kernel's result + Σ e^score · own value) / (e^lse + Σ e^score)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def _kernel(compiled: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """Result and log-sum-exp; as it stands, without compiling, it holds all scores and has no gradient on a CPU."""
    from torch.nn.attention import flex_attention as flex

    request = {"return_aux": flex.AuxRequest(lse=True)} if hasattr(flex, "AuxRequest") else {"return_lse": True}
    run: Any = torch.compile(flex.flex_attention, dynamic=True) if compiled else flex.flex_attention

    def call(*arguments: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        read, more = run(*arguments, **keywords, **request)
        return read, more if isinstance(more, Tensor) else more.lse

    return call


def attend_flex(q: Tensor, k0: Tensor, v0: Tensor, seen: Tensor, own: Sequence[tuple[Tensor, Tensor]] = ()) -> Tensor:
    """What unroll rows read: committed keys that ``seen`` (B, R, T) shows, and one own key a later step.

    Shapes: q (B, heads, R, D), k0 and v0 (B, kv_heads, T, D), own (B, kv_heads, R, D) each; returns (B, heads, R, D).
    """
    from torch.nn.attention.flex_attention import create_block_mask

    b, heads, r, d = q.shape
    kv, t = k0.shape[1], k0.shape[2]

    def visible(text: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return seen[text, row, column]

    mask = create_block_mask(visible, b, None, r, t, device=q.device)
    read, lse = _kernel(q.is_cuda)(q, k0, v0, block_mask=mask, enable_gqa=heads != kv)
    if not own:
        return read
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.view(b, kv, heads // kv, r, d).to(wide) * d**-0.5
    scores = torch.stack([(grouped * k[:, :, None].to(wide)).sum(-1) for k, _ in own], -1).view(b, heads, r, len(own))
    whole = torch.cat([lse[..., None].to(wide), scores], -1).logsumexp(-1, keepdim=True)
    weights = (scores - whole).exp().to(q.dtype)
    read = read * (lse[..., None].to(wide) - whole).exp().to(q.dtype)
    for step, (_, v) in enumerate(own):
        read = read + weights[..., step, None] * v.repeat_interleave(heads // kv, 1)
    return read
