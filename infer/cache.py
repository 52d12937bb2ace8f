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

from heads import compat
from heads.kv import KVStore, RowView
from heads.target import Target

# what generate itself would use for a layer → whether that layer has a sliding window
SUPPORTED: dict[type, bool] = {DynamicLayer: False, DynamicSlidingWindowLayer: True}


class ForgettingLayer(CacheLayerMixin):
    """Keys and values of one attention layer, (B, kv_heads, length, head_dim), all of them kept until forgotten."""

    is_croppable = True
    kind: type[KVStore] = KVStore

    def __init__(self, sliding: bool, capacity: int) -> None:
        super().__init__()
        self.is_sliding = sliding  # read by transformers to choose the mask a prefill needs
        self.capacity = capacity
        self.store: KVStore | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate once shapes are known; doubled when full."""
        batch, heads, _, dim = key_states.shape
        self.store = self.kind(
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
    """A cache for ``target`` whose rejected rows can be taken back; each text of a batch has its own length.

    Args:
        target: whose layers' kinds decide what is kept.
        batch: texts.
        capacity: entries allocated at first in each layer.

    Raises:
        ValueError: a layer keeps a state that cannot be rolled back (recurrent, hybrid, compressed, shared …); the
            message names its type.
    """

    layer_kind: type[ForgettingLayer] = ForgettingLayer

    def __init__(self, target: Target, batch: int = 1, *, capacity: int = 256) -> None:
        kinds = [type(layer) for layer in DynamicCache(config=compat.decoder_config(target.model)).layers]
        for index, kind in enumerate(kinds):
            if kind not in SUPPORTED:
                name = target.layer_types[index] if index < len(target.layer_types) else "unknown"
                raise ValueError(
                    f"layer {index} of {type(target.model).__name__} is of type {name!r} ({kind.__name__}): its state "
                    "cannot be rolled back after a rejected draft, so this target is not supported"
                )
        self.forgetting = [self.layer_kind(SUPPORTED[kind], capacity) for kind in kinds]
        self._batch = batch
        self._rows: list[CacheRow] = []
        super().__init__(layers=list(self.forgetting))

    @property
    def length(self) -> int:
        """Positions stored for the longest text."""
        return self.get_seq_length()

    @property
    def lengths(self) -> list[int]:
        """Positions stored for each text."""
        store = self.forgetting[0].store
        return [0] * self._batch if store is None else list(store.lengths)

    def columns(self, rows: int) -> int:
        """Keys that a pass over ``rows`` new rows attends over: the width of its mask."""
        return self.length + rows

    def expect(self, rows: int) -> None:
        """The next pass has ``rows`` new rows a text; a cache that grows needs no notice."""

    def keep(self, bases: int | Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Keep each text's first ``base`` positions and then, closed up, those at ``base + offset`` for its path."""
        for layer in self.forgetting:
            if layer.store is not None:
                layer.store.keep(bases, paths)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these texts only, in this order; views of the others (:meth:`row`) may not be used again."""
        for layer in self.forgetting:
            if layer.store is not None:
                layer.store.select(rows)
        self._batch = len(rows)
        place = {old: new for new, old in enumerate(rows)}
        self._rows = [row for row in self._rows if row.index in place]
        for row in self._rows:
            row.index = place[row.index]

    def row(self, index: int) -> CacheRow:
        """The text at ``index``, followed wherever :meth:`select` moves it."""
        self._rows.append(CacheRow(self, index))
        return self._rows[-1]


class CacheRow:
    """One text's part of the cache, for drafters that draft with the target's own layers.

    Drafted entries may be appended behind the committed ones and must be cropped away before the target's next pass.
    """

    def __init__(self, cache: ForgettingCache, index: int) -> None:
        self._cache, self.index = cache, index

    @property
    def length(self) -> int:
        """Positions stored of the text in the layer with fewest."""
        return min(self.layer(at).length for at in range(len(self._cache.forgetting)))

    def layer(self, at: int) -> RowView:
        """Keys and values of layer ``at``; there are none before the target's first pass.

        Raises:
            ValueError: before that pass.
        """
        store = self._cache.forgetting[at].store
        if store is None:
            raise ValueError("the target has not read the prompt yet: its cache is empty")
        return RowView(store, self.index)

    def crop(self, length: int) -> None:
        """Forget in every layer what stands at and behind ``length``."""
        for at in range(len(self._cache.forgetting)):
            self.layer(at).crop(length)
