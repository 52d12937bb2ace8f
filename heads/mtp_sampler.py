"""The sampler of mtp heads: what a mask would draft, moved by the token before (arXiv 2507.11851)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heads.norm import RMSNorm


class Conditional(nn.Module):
    """The sampler: a mask's state, moved by what the token before says; at first not at all."""

    def __init__(self, width: int, inner: int, eps: float) -> None:
        super().__init__()
        self.state_norm, self.token_norm = RMSNorm(width, eps=eps), RMSNorm(width, eps=eps)
        self.up_proj = nn.Linear(2 * width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, states: Tensor, embedding: Tensor) -> Tensor:
        """(n, H) of states (n or 1, H) and the embeddings (n, H) of the tokens before."""
        states = states.to(self.down_proj.weight.dtype).expand(embedding.shape[0], -1)
        seen = torch.cat([self.state_norm(states), self.token_norm(embedding.to(states))], -1)
        return states + self.down_proj(F.silu(self.up_proj(seen)))
