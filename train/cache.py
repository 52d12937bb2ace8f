"""The target's states on disk: computed once, read at random afterwards.

    features/3f1c…/   key.json                              what the states are of
                      states-00000-of-00008.safetensors     a run of conversations: a row a token, by column
                      states-00000-of-00008.json            note that it was found right (train/shards.py)
                      claims                                which are being computed, by whichever process

A shard is there when it is whole, so a build that was stopped or killed goes on with the shards that are missing, and
several processes and runs can build at once. A shard that is not what was written is named and computed again. Shards
are memory-mapped: any conversation is one seek away, and how much stays in memory is up to the system. A cache of more
taps is read where one of fewer is asked for (``train/cache_wider.py``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from heads.judge import TrainingBatch
from train import shards
from train.cache_build import Progress, Say, build, check
from train.cache_spec import CacheSpec
from train.cache_wider import Wider, wider
from train.features import as_batch, pad_ids
from train.ranks import Ranks


class CachedFeatures:
    """Reads states from the shards of a folder.

    Args:
        spec: what is read.
        folder: of the shards.
        wider: where the shards hold more than that.
    """

    def __init__(self, spec: CacheSpec, folder: Path, wider: Wider | None = None) -> None:
        self.spec, self.conversations, self.folder, self.wider = spec, spec.conversations, folder, wider
        self._stored = spec if wider is None else wider.spec
        lengths = spec.conversations.lengths
        self._starts = np.cumsum(lengths) - lengths
        self._firsts = [first for first, _ in self._stored.ranges]
        self._shards: dict[int, dict[str, Tensor]] = {}

    def columns(self, index: int) -> dict[str, Tensor]:
        """A conversation's states by column, (T, width) each.

        Raises:
            OSError: its shard is gone or was cut since it was checked.
        """
        shard = bisect_right(self._firsts, index) - 1
        if shard not in self._shards:
            self._shards[shard] = shards.read(self._stored.path(self.folder, shard))
        start = int(self._starts[index] - self._starts[self._firsts[shard]])
        end = start + int(self.conversations.lengths[index])
        found = {name: values[start:end] for name, values in self._shards[shard].items()}
        return found if self.wider is None else self.wider.pick(found)

    def batch(self, indices: Sequence[int]) -> TrainingBatch:
        """See :class:`train.features.FeatureSource`."""
        ids, loss_mask, mask = pad_ids(self.conversations, indices)
        storage, device = self.spec.storage, self.spec.target.device
        found = {name: torch.zeros(*ids.shape, width, dtype=dtype) for name, (width, dtype) in storage.columns.items()}
        for row, index in enumerate(indices):
            for name, values in self.columns(index).items():
                found[name][row, : len(values)] = values
        moved = {name: values.to(device) for name, values in found.items()}
        return as_batch(ids.to(device), loss_mask.to(device), mask.to(device), moved, storage)

    def expect(self, batches: Sequence[Sequence[int]]) -> None:
        """The system reads ahead by itself."""


def open_or_build(
    spec: CacheSpec, root: Path, ranks: Ranks, progress: Progress | None = None, say: Say = lambda text: None
) -> CachedFeatures:
    """The cache's reader; all ranks call it, and together compute what is not there, or not right.

    Where a cache of more taps is whole under ``root`` and this one is not there at all, that one is read.
    """
    folder = spec.folder(root)
    taps = ranks.share(wider(spec, root) if ranks.main else None)
    if taps is not None:
        return _from_wider(Wider(spec, replace(spec, taps=taps)), root, ranks, progress, say)
    missing = check(spec, folder, ranks, say)
    size, count = sum(map(spec.tokens, missing)) * spec.storage.token_bytes / 2**30, len(spec.ranges)
    what = f"states: {spec.conversations.lengths.sum():,} tokens, {spec.bytes / 2**30:.2f} GiB in {count} shards"
    say(f"{what}, {f'{len(missing)} of them ({size:.2f} GiB) to be computed' if missing else 'all found'} in {folder}")
    if missing:
        build(spec, folder, ranks, progress)
    return CachedFeatures(spec, folder)


def _from_wider(one: Wider, root: Path, ranks: Ranks, progress: Progress | None, say: Say) -> CachedFeatures:
    say(f"states at taps {list(one.wanted.taps)}: read from those at taps {list(one.spec.taps)}")
    read = open_or_build(one.spec, root, ranks, progress, say)
    return CachedFeatures(one.wanted, read.folder, one)


__all__ = ["CacheSpec", "CachedFeatures", "build", "open_or_build"]
