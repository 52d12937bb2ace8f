"""The decoder layer of heads that draft one token after another: attention and a gated feed-forward part (Llama's)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heads.config import ConfigError, HeadsConfig
from heads.norm import RMSNorm
from heads.rotary import apply_rotary, rotary
from heads.target import Target

Attend = Callable[[Tensor], Tensor]


class DecoderLayer(nn.Module):
    """Attention reads what it is given, the residual stream is given apart; norms before it are the heads' own.

    Args:
        config: of the heads; its options hold the layer's shape (:func:`layer_shape`).
        reads: width of what attention reads.
        norms: names of norms of width H that a subclass applies before it.

    Raises:
        ConfigError: the window is none.
    """

    def __init__(self, config: HeadsConfig, reads: int, norms: Sequence[str] = ()) -> None:
        super().__init__()
        o, width = config.options, config.hidden_size
        check_window(o["window"])
        for name in norms:
            setattr(self, name, RMSNorm(width, eps=o["rms_norm_eps"]))
        self.heads, self.kv_heads, self.head_dim = o["num_attention_heads"], o["num_key_value_heads"], o["head_dim"]
        self.rope_theta, inner = float(o["rope_theta"]), o["intermediate_size"]
        self.post_attention_layernorm = RMSNorm(width, eps=o["rms_norm_eps"])
        self.q_proj = nn.Linear(reads, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(reads, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(reads, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, width, bias=False)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Rotary factors of positions (B, n)."""
        return rotary(positions, self.head_dim, self.rope_theta, dtype)

    def keys_values(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values (B, kv_heads, n, head_dim) of what attention reads (B, n, reads)."""
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2)
        return apply_rotary(k, rotation), v

    def forward(self, x: Tensor, residual: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Output (B, n, H), before any final norm.

        Args:
            x: (B, n, reads) what attention reads.
            residual: (B, n, H) the stream that the layer adds to.
            rotation: of the rows' positions.
            attend: maps queries (B, heads, n, head_dim) to their reading.
        """
        q = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
        read = attend(apply_rotary(q, rotation)).transpose(1, 2).flatten(2)
        hidden = residual + self.o_proj(read)
        y = self.post_attention_layernorm(hidden)
        return hidden + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


def check_window(window: Any) -> None:
    """Refuse a draft window that cannot be one."""
    if type(window) is not int or window < 0:
        raise ConfigError(f"window must be 0 (all committed rows) or how many of the last ones, not {window!r}")


def layer_shape(target: Target) -> dict[str, int]:
    """Options that give a layer the shape of the target's own."""
    c, heads = target.config, target.config.num_attention_heads
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(c, "num_key_value_heads", None) or heads,
        "head_dim": getattr(c, "head_dim", None) or target.hidden_size // heads,
        "intermediate_size": getattr(c, "intermediate_size", None) or 4 * target.hidden_size,
    }


QUERIES = "queries"
"""For ``num_key_value_heads``: as many as there are of queries, on whatever target."""


def counted(options: dict[str, Any]) -> dict[str, Any]:
    """Options as they are kept: :data:`QUERIES` is the number that it stands for."""
    if options.get("num_key_value_heads") != QUERIES:
        return options
    return options | {"num_key_value_heads": options["num_attention_heads"]}


LAYER_DEFAULTS: dict[str, Any] = {
    "rope_theta": 10000.0,  # what the engines assume when a config does not say
    "rms_norm_eps": 1e-5,
    "window": 0,  # committed rows that a draft attends, the last ones; 0: all
}
