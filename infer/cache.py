"""The target's key/value cache that can forget: rejected drafts leave no trace, a tree's accepted path is closed up.

One :class:`heads.kv.KVStore` a layer, behind the interface transformers models expect of a cache. Layers with a
sliding window keep all their keys, because what a window has dropped cannot be brought back when a draft is
rejected; the window is cut out of the mask instead (``heads.Target.forward`` for trees, the model itself
otherwise).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from heads.kv import KVStore
from heads.target import Target

# what generate itself would use for a layer → whether that layer has a sliding window
SUPPORTED: dict[type, bool] = {DynamicLayer: False, DynamicSlidingWindowLayer: True}


class ForgettingLayer(CacheLayerMixin):
    """Keys and values of one attention layer, (1, kv_heads, length, head_dim), all of them kept until forgotten."""

    is_croppable = True

    def __init__(self, sliding: bool, capacity: int) -> None:
        super().__init__()
        self.is_sliding = sliding  # read by transformers to choose the mask a prefill needs
        self.capacity = capacity
        self.store: KVStore | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate once shapes are known; doubled when full."""
        batch, heads, _, dim = key_states.shape
        self.store = KVStore(
            batch,
            heads,
            dim,
            dtype=key_states.dtype,
            device=key_states.device,
            capacity=self.capacity,
            value_dim=value_states.shape[-1],
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append (1, kv_heads, n, head_dim) and return views of everything stored."""
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
        assert self.store is not None
        return self.store.append(key_states, value_states)

    def get_seq_length(self) -> int:
        return 0 if self.store is None else self.store.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class ForgettingCache(Cache):
    """A cache for ``target`` at batch 1 whose rejected rows can be taken back.

    Args:
        target: whose layers' kinds decide what is kept.
        capacity: entries allocated at first in each layer.

    Raises:
        ValueError: a layer keeps a state that cannot be rolled back (recurrent, hybrid, compressed, shared …); the
            message names its type.
    """

    def __init__(self, target: Target, capacity: int = 256) -> None:
        kinds = [type(layer) for layer in DynamicCache(config=target.model.config).layers]
        for index, kind in enumerate(kinds):
            if kind not in SUPPORTED:
                name = target.layer_types[index] if index < len(target.layer_types) else "unknown"
                raise ValueError(
                    f"layer {index} of {type(target.model).__name__} is of type {name!r} ({kind.__name__}): its state "
                    "cannot be rolled back after a rejected draft, so this target is not supported"
                )
        self.forgetting = [ForgettingLayer(SUPPORTED[kind], capacity) for kind in kinds]
        super().__init__(layers=list(self.forgetting))

    @property
    def length(self) -> int:
        """Positions stored."""
        return self.get_seq_length()

    def keep(self, base: int, path: Sequence[int]) -> None:
        """Keep the first ``base`` positions and then, closed up, those at ``base + offset`` for each of ``path``."""
        for layer in self.forgetting:
            if layer.store is not None:
                layer.store.keep(base, [path])
