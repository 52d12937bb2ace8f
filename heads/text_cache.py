"""A cache of whole texts, behind which rows may be read again and again, with gradients, and are never kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from heads.target import Target


class TextLayer(CacheLayerMixin):
    """Keys and values (B, kv_heads, T, head_dim) of the first pass; those of later passes stand behind, for that pass.

    All keys are kept, windowed layers' too: rows may be read behind any position.
    """

    def __init__(self, sliding: bool) -> None:
        super().__init__()
        self.is_sliding = sliding  # read by transformers to choose the mask of a pass without one

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = key_states, value_states
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep (B, kv_heads, n, head_dim) if they are the first, else put them behind without keeping them."""
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
            return key_states, value_states
        return torch.cat([self.keys, key_states], 2), torch.cat([self.values, value_states], 2)

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class TextCache(Cache):
    """A cache for ``target``: what its first pass reads stays, what later ones read does not."""

    def __init__(self, target: Target) -> None:
        super().__init__(layers=[TextLayer(kind == "sliding_attention") for kind in target.layer_types])
