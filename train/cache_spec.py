"""What a cache of the target's states holds, how large it is, and how it is cut into shards; known beforehand."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from heads.target import Target
from train.conversations import Conversations
from train.storage import Storage

FORMAT = 2
SHARD_BYTES = 64 << 20, 1 << 30  # smallest and largest; about 256 shards between


@dataclass(frozen=True)
class CacheSpec:
    """What a cache holds: the states of ``conversations`` at ``taps`` of ``target``, rounded to ``dtype``."""

    target: Target
    conversations: Conversations
    taps: tuple[int, ...]
    dtype: torch.dtype
    kernels: str = "torch"

    @property
    def storage(self) -> Storage:
        """Columns of a token."""
        return Storage(len(self.taps), self.target.hidden_size, self.dtype)

    @property
    def bytes(self) -> int:
        """Size of all states."""
        return int(self.conversations.lengths.sum()) * self.storage.token_bytes

    @property
    def shard_bytes(self) -> int:
        """What a shard holds at least, but for the last."""
        smallest, largest = SHARD_BYTES
        return min(max(self.bytes // 256, smallest), largest)

    @cached_property
    def ranges(self) -> list[tuple[int, int]]:
        """First conversation of each shard, and the one behind its last."""
        before = np.cumsum(self.conversations.lengths) - self.conversations.lengths
        tokens = -(-self.shard_bytes // self.storage.token_bytes)
        ranges, first = [], 0
        while first < len(before):
            end = int(np.searchsorted(before, before[first] + tokens))
            ranges.append((first, end))
            first = end
        return ranges

    def tokens(self, shard: int) -> int:
        """Rows of a shard."""
        first, end = self.ranges[shard]
        return int(self.conversations.lengths[first:end].sum())

    @cached_property
    def key(self) -> dict[str, Any]:
        """All that determines the content: runs with equal keys share one cache."""
        identity = self.target.identity().to_dict()
        return {
            "format": FORMAT,
            "target": {key: identity[key] for key in ("fields", "weights", "quantizer", "adapter")},
            "target_dtype": str(self.target.dtype),
            "taps": list(self.taps),
            "dtype": str(self.dtype),
            "data": self.conversations.digest,
            "shard_bytes": self.shard_bytes,
            **({"kernels": self.kernels} if self.kernels != "torch" else {}),
        }

    @property
    def name(self) -> str:
        """Of the folder, by the key."""
        return hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()[:16]

    def folder(self, root: Path) -> Path:
        """Where the cache lies under ``root``, whether it exists or not."""
        return root / self.name

    def path(self, folder: Path, shard: int) -> Path:
        """A shard's file."""
        return folder / f"states-{shard:05d}-of-{len(self.ranges):05d}.safetensors"

    def missing(self, folder: Path) -> list[int]:
        """Numbers of the shards that are not in a folder, which may not be there itself."""
        there = {path.name for path in folder.glob("*.safetensors")}
        return [shard for shard in range(len(self.ranges)) if self.path(folder, shard).name not in there]

    def missing_bytes(self, folder: Path) -> int:
        """What computing them adds."""
        return sum(map(self.tokens, self.missing(folder))) * self.storage.token_bytes

    def about(self, shard: int) -> dict[str, str]:
        """What a shard's header says of it."""
        first, end = self.ranges[shard]
        return {"cache": self.name, "conversations": f"{first}-{end - 1}"}
