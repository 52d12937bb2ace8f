"""The layer of block heads, and how many blocks of a training text attend side by side."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heads.config import HeadsConfig
from heads.norm import RMSNorm
from heads.rotary import apply_rotary

SCORES = 1 << 23  # attention scores held at a time, where a text of t tokens has heads·slots·t² of them

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # the block's (q, k, v), each (B, heads, n, head_dim) → read


class BlockLayer(nn.Module):
    """A decoder layer with normed queries and keys, whose keys and values are also asked for of the context."""

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        o, width = config.options, config.hidden_size
        self.heads, self.kv_heads, self.head_dim = o["num_attention_heads"], o["num_key_value_heads"], o["head_dim"]
        eps, inner = o["rms_norm_eps"], o["intermediate_size"]
        self.input_layernorm = RMSNorm(width, eps=eps)
        self.post_attention_layernorm = RMSNorm(width, eps=eps)
        self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, width, bias=False)
        self.q_norm = RMSNorm(self.head_dim, eps=eps)
        self.k_norm = RMSNorm(self.head_dim, eps=eps)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def keys_values(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values (B, kv_heads, n, head_dim) of context or of normed block states, (B, n, H)."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2)
        return apply_rotary(k, rotation), v

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Output (B, n, H) of the block's states."""
        x = self.input_layernorm(hidden)
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))).transpose(1, 2)
        read = attend(apply_rotary(q, rotation), *self.keys_values(x, rotation))
        hidden = hidden + self.o_proj(read.transpose(1, 2).flatten(2))
        y = self.post_attention_layernorm(hidden)
        return hidden + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


def attend_blocks(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of many blocks side by side: each over the context that it may see and over itself.

    Shapes: q (B, heads, R·S, D), keys and values (B, kv_heads, T, D), visible (B, R, T), k and v (B, kv_heads, R·S, D);
    returns (B, heads, R·S, D). Query heads are grouped over their key head; the softmax is float32 or wider.
    """
    b, heads, n, d = q.shape
    kv, t = keys.shape[1], keys.shape[2]
    r = visible.shape[1]
    s = n // max(r, 1)
    grouped = q.view(b, kv, heads // kv, r, s, d) * d**-0.5
    k, v = k.view(b, kv, r, s, d), v.view(b, kv, r, s, d)
    step = max(1, SCORES // max(1, b * heads * s * (t + s)))
    read = []
    for at in range(0, max(r, 1), step):
        some = slice(at, at + step)
        part = grouped[:, :, :, some]
        context = torch.einsum("bkgrsd,bktd->bkgrst", part, keys)
        context = context.masked_fill(~visible[:, None, None, some, None], float("-inf"))
        scores = torch.cat([context, torch.einsum("bkgrsd,bkrud->bkgrsu", part, k[:, :, some])], -1)
        weights = scores.to(torch.promote_types(q.dtype, torch.float32)).softmax(-1).to(q.dtype)
        own = torch.einsum("bkgrsu,bkrud->bkgrsd", weights[..., t:], v[:, :, some])
        read.append(own + torch.einsum("bkgrst,bktd->bkgrsd", weights[..., :t], values))
    return torch.cat(read, 3).reshape(b, heads, n, d)
