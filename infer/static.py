"""A cache of fixed shape: allocated once, never moved, and attended over whole.

Keys and values keep their place in memory and passes their shape, which is what compiled passes need. After the
prefill a pass writes its rows where :meth:`StaticCache.expect` says and attends over all the capacity there is; what
is behind a text's own rows is masked. The prefill is read as with a cache that grows: over what is there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heads.kv import KVStore
from heads.target import Target
from infer.cache import ForgettingCache, ForgettingLayer


class FixedStore(KVStore):
    """A store that does not grow."""

    def reserve(self, length: int) -> None:
        """Check that there is room.

        Raises:
            ValueError: there is not.
        """
        capacity = self.keys.shape[2]
        if length > capacity:
            raise ValueError(
                f"the static cache is full: it holds {capacity} positions and {length} are needed; give a larger "
                "max_cache_len or leave cache_implementation out"
            )


class StaticLayer(ForgettingLayer):
    """Keys and values of one attention layer, (B, kv_heads, capacity, head_dim)."""

    is_compileable = True
    kind = FixedStore

    def __init__(self, sliding: bool, capacity: int) -> None:
        super().__init__(sliding, capacity)
        self.places: Tensor | None = None  # (B, n) where the rows of the next pass go; None: behind what is there

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate once shapes are known, at addresses that compiled passes may rely on."""
        super().lazy_initialization(key_states, value_states)
        assert self.store is not None
        torch._dynamo.mark_static_address(self.store.keys)
        torch._dynamo.mark_static_address(self.store.values)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write (B, kv_heads, n, head_dim) and return all there is room for; in a prefill all that is stored."""
        if self.places is None:
            return super().update(key_states, value_states)
        assert self.store is not None
        places = self.places[:, None, :, None]
        self.store.keys.scatter_(2, places.expand_as(key_states), key_states)
        self.store.values.scatter_(2, places.expand_as(value_states), value_states)
        return self.store.keys, self.store.values

    def get_seq_length(self) -> Any:
        if torch.compiler.is_compiling() and self.places is not None:
            return self.places[0, 0]  # a number would be compiled in
        return super().get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return super().get_mask_sizes(query_length) if self.places is None else (self.capacity, 0)

    def get_max_length(self) -> int:
        return self.capacity


class StaticCache(ForgettingCache):
    """A :class:`~infer.cache.ForgettingCache` of ``capacity`` positions a text, all allocated by the first pass.

    Raises:
        ValueError: as for a cache that grows; from a pass, that it is full.
    """

    layer_kind = StaticLayer

    def __init__(self, target: Target, batch: int = 1, *, capacity: int) -> None:
        super().__init__(target, batch, capacity=capacity)
        self.capacity, self._passing = capacity, False

    def columns(self, rows: int) -> int:
        """All of them, once the prompts are read."""
        return self.capacity if self._passing else super().columns(rows)

    def expect(self, rows: int) -> None:
        """The next pass has ``rows`` new rows a text, which go behind what each holds."""
        lengths = self.lengths
        self._passing = True
        for layer in self.forgetting:
            assert layer.store is not None, "the prompts are read first"
            layer.store.reserve(max(lengths) + rows)
        device = self.forgetting[0].store.keys.device  # type: ignore[union-attr]
        places = torch.tensor(lengths)[:, None] + torch.arange(rows)
        places = places.to(device)
        for layer in self.forgetting:
            layer.places = places  # type: ignore[attr-defined]

    def clear(self) -> None:
        """Empty it for another text, in the same place."""
        self._passing = False
        for layer in self.forgetting:
            layer.places = None  # type: ignore[attr-defined]
            if layer.store is not None:
                layer.store.crop(0)
