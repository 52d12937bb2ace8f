"""A preallocated key/value store that can forget: what drafting heads and the target's cache are built on.

Rows of the batch keep their own lengths. Each row's entries lie packed from the left, so that a row reads
``[:length]`` and nothing in between; rejected draft entries are dropped by :meth:`KVStore.keep`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class KVStore:
    """Keys and values of one attention layer, (batch, kv_heads, length, head_dim).

    Args:
        batch: rows.
        kv_heads: key/value heads.
        head_dim: width of a key; ``value_dim`` where values differ.
        dtype, device: of what is stored.
        capacity: entries allocated at first, 1 or more; doubled whenever they are used up.
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        capacity: int = 256,
        value_dim: int | None = None,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"a store needs a capacity of 1 or more, not {capacity}")
        self.keys = torch.zeros(batch, kv_heads, capacity, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros(batch, kv_heads, capacity, value_dim or head_dim, dtype=dtype, device=device)
        self.lengths = [0] * batch

    @property
    def length(self) -> int:
        """Entries of the longest row: the width of what :meth:`append` returns."""
        return max(self.lengths, default=0)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add n entries to every row, each at its own end.

        Args:
            k, v: (batch, kv_heads, n, head_dim).

        Returns:
            Views (batch, kv_heads, length, head_dim) of all that is stored; of a row shorter than the longest
            the entries past its own length are leftovers, which the caller masks.
        """
        n = k.shape[2]
        self.reserve(self.length + n)
        start = self.lengths[0]
        if all(length == start for length in self.lengths):
            self.keys[:, :, start : start + n] = k
            self.values[:, :, start : start + n] = v
        else:
            for row, length in enumerate(self.lengths):
                self.keys[row, :, length : length + n] = k[row]
                self.values[row, :, length : length + n] = v[row]
        self.lengths = [length + n for length in self.lengths]
        return self.view()

    def view(self) -> tuple[Tensor, Tensor]:
        """All stored entries, as :meth:`append` returns them."""
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def crop(self, length: int) -> None:
        """Forget what stands at and behind ``length`` in every row."""
        self.lengths = [min(length, own) for own in self.lengths]

    def keep_last(self, length: int) -> None:
        """Forget the oldest entries of every row, all but the last ``length``."""
        for row, own in enumerate(self.lengths):
            if (spare := own - length) > 0:
                for stored in (self.keys, self.values):
                    stored[row, :, :length] = stored[row, :, spare:own].clone()
                self.lengths[row] = length

    def keep(self, base: int | Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Keep each row's first ``base`` entries and, of those behind, only its path, closed up in that order.

        Args:
            base: entries that stay as they are, one number or one a row.
            paths: for each row, increasing offsets from its base (a round's accepted rows of the pass).
        """
        bases = [base] * len(self.lengths) if isinstance(base, int) else list(base)
        for row, (start, path) in enumerate(zip(bases, paths, strict=True)):
            # an unbroken run from the base already stands where it belongs
            if list(path) != list(range(len(path))):
                source = torch.tensor([start + p for p in path], device=self.keys.device)
                end = start + len(path)
                self.keys[row, :, start:end] = self.keys[row].index_select(1, source)
                self.values[row, :, start:end] = self.values[row].index_select(1, source)
            self.lengths[row] = start + len(path)

    def select(self, rows: Sequence[int]) -> None:
        """Reorder, repeat or drop rows of the batch."""
        index = torch.tensor(list(rows), device=self.keys.device)
        self.keys, self.values = self.keys.index_select(0, index), self.values.index_select(0, index)
        self.lengths = [self.lengths[row] for row in rows]

    def reserve(self, length: int) -> None:
        """Make room for ``length`` entries a row, doubling."""
        capacity = self.keys.shape[2]
        if length <= capacity:
            return
        while capacity < length:
            capacity *= 2
        for name in ("keys", "values"):
            old: Tensor = getattr(self, name)
            new = old.new_zeros(*old.shape[:2], capacity, old.shape[3])
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)


class RowView:
    """One row of a store, as batch 1, for a drafter that goes on from the target's own keys and values.

    What is appended stands in the store itself, behind the row's entries, and is forgotten by :meth:`crop`.

    Args:
        store: may grow or be reordered meanwhile; set ``index`` to where the row went.
        index: of the row.
    """

    def __init__(self, store: KVStore, index: int) -> None:
        self.store, self.index = store, index

    @property
    def length(self) -> int:
        """Entries of the row."""
        return self.store.lengths[self.index]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add k, v (1, kv_heads, n, head_dim) behind the row; views (1, kv_heads, length, head_dim) of all of it."""
        end = self.length + k.shape[2]
        self.store.reserve(end)
        self.store.keys[self.index, :, self.length : end] = k[0]
        self.store.values[self.index, :, self.length : end] = v[0]
        self.store.lengths[self.index] = end
        return self.view()

    def view(self) -> tuple[Tensor, Tensor]:
        """The row's entries, as :meth:`append` returns them."""
        at, length = self.index, self.length
        return self.store.keys[at : at + 1, :, :length], self.store.values[at : at + 1, :, :length]

    def crop(self, length: int) -> None:
        """Forget what stands at and behind ``length``."""
        self.store.lengths[self.index] = min(length, self.length)
