"""The target's states on disk: computed once, read at random afterwards.

Three flat files, an entry a token in the order of the conversations: ``states.bin`` (taps side by side, then the
post-norm hidden state, in the storage dtype), ``top.bin`` (int32) and ``lse.bin`` (float32), see
:class:`train.features.States`. They are memory-mapped: any conversation is one seek away, and how
much stays in memory is up to the system.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from heads.judge import TrainingBatch
from heads.target import Target
from train.conversations import Conversations
from train.features import States, as_batch, pad_ids, run_target
from train.ranks import Ranks
from train.workers import pwrite_all, side_by_side

FORMAT = 1
BUILD_TOKENS = 4096  # padded tokens of one pass while the cache is built
Progress = Callable[[int, int], None]  # tokens done, tokens in all


@dataclass(frozen=True)
class CacheSpec:
    """What a cache holds: the states of ``conversations`` at ``taps`` of ``target``, rounded to ``dtype``."""

    target: Target
    conversations: Conversations
    taps: tuple[int, ...]
    dtype: torch.dtype

    @property
    def width(self) -> int:
        """Values a token in states.bin."""
        return self.target.hidden_size * (len(self.taps) + 1)

    @property
    def starts(self) -> np.ndarray:
        """(N + 1,) first token of each conversation, and the number of tokens."""
        return np.concatenate([[0], np.cumsum(self.conversations.lengths)])

    @property
    def columns(self) -> dict[str, tuple[int, torch.dtype]]:
        """File → values a token, dtype."""
        return {"states.bin": (self.width, self.dtype), "top.bin": (1, torch.int32), "lse.bin": (1, torch.float32)}

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return int(self.starts[-1]) * sum(width * dtype.itemsize for width, dtype in self.columns.values())

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
        }

    def folder(self, root: Path) -> Path:
        """Where the cache lies under ``root``, whether it exists or not."""
        return root / hashlib.sha256(json.dumps(self.key(), sort_keys=True).encode()).hexdigest()[:16]


class CachedFeatures:
    """Reads states from the files that :func:`build` made.

    Raises:
        OSError: a file is missing or not as long as it must be.
    """

    def __init__(self, spec: CacheSpec, folder: Path) -> None:
        self.spec, self.conversations, self.starts = spec, spec.conversations, spec.starts
        self.states, self.top, self.lse = (
            self._open(folder / name, width, dtype) for name, (width, dtype) in spec.columns.items()
        )

    def _open(self, path: Path, width: int, dtype: torch.dtype) -> Tensor:
        tokens = int(self.starts[-1])
        size, wanted = path.stat().st_size, tokens * width * dtype.itemsize
        if size != wanted:
            raise OSError(f"{path} has {size} bytes where {wanted} are expected: delete {path.parent} and run again")
        return torch.from_file(str(path), shared=False, size=tokens * width, dtype=dtype).view(tokens, width)

    def batch(self, indices: Sequence[int]) -> TrainingBatch:
        """See :class:`train.features.FeatureSource`."""
        ids, loss_mask, mask = pad_ids(self.conversations, indices)
        states = States(*(part.new_zeros(*ids.shape, part.shape[-1]) for part in (self.states, self.top, self.lse)))
        for row, index in enumerate(indices):
            start, end = self.starts[index], self.starts[index + 1]
            states.values[row, : end - start] = self.states[start:end]
            states.top[row, : end - start] = self.top[start:end]
            states.lse[row, : end - start] = self.lse[start:end]
        device = self.spec.target.device
        moved = States(states.values.to(device), states.top[..., 0].to(device), states.lse[..., 0].to(device))
        hidden_size = self.spec.target.hidden_size
        return as_batch(ids.to(device), loss_mask.to(device), mask.to(device), moved, hidden_size)


def by_length(lengths: np.ndarray, budget: int) -> Iterator[list[int]]:
    """Conversation numbers in groups of like length, each at most ``budget`` padded tokens (or one conversation)."""
    group: list[int] = []
    for index in np.argsort(-lengths, kind="stable").tolist():
        if group and lengths[group[0]] * (len(group) + 1) > budget:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def build(spec: CacheSpec, folder: Path, ranks: Ranks, progress: Progress | None = None) -> None:
    """Write the cache to ``folder``, each rank its share: beside it first, renamed when whole.

    All ranks call it, and all see ``folder``'s disk. Of two runs that build at once the first to finish wins.

    Raises:
        OSError: not enough room on the disk (told before anything is computed), or writing failed.
    """
    partial = folder.with_name(ranks.share(f".{folder.name}-{os.getpid()}-{time.time_ns()}"))
    try:
        if ranks.main:
            _allocate(spec, partial)
        ranks.wait()
        _fill(spec, partial, ranks, progress)
        ranks.wait()
        if ranks.main:
            (partial / "key.json").write_text(json.dumps(spec.key(), indent=1))
            try:
                partial.rename(folder)
            except OSError:
                if not (folder / "key.json").is_file():  # not another run's finished work
                    raise
        ranks.wait()
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _allocate(spec: CacheSpec, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    room = shutil.disk_usage(folder.parent).free
    if spec.bytes > room:
        raise OSError(
            f"the target's states need {spec.bytes / 2**30:.2f} GiB in {folder.parent}, where {room / 2**30:.2f} GiB "
            "are free: set data.cache_folder to another disk, or data.features to online"
        )
    folder.mkdir()
    tokens = int(spec.starts[-1])
    for name, (width, dtype) in spec.columns.items():
        with (folder / name).open("wb") as file:
            file.truncate(tokens * width * dtype.itemsize)


def _fill(spec: CacheSpec, folder: Path, ranks: Ranks, progress: Progress | None) -> None:
    lengths, done = spec.conversations.lengths, 0
    mine = list(by_length(lengths, BUILD_TOKENS))[ranks.index :: ranks.count]
    total = sum(int(lengths[group].sum()) for group in mine)
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context((folder / name).open("r+b", buffering=0)) for name in spec.columns}
        for group in side_by_side(lambda group: _write(spec, files, group), mine, spec.target.device):
            done += int(lengths[group].sum())
            if progress:
                progress(done, total)
        for file in files.values():
            os.fsync(file.fileno())


def _write(spec: CacheSpec, files: dict[str, IO[bytes]], group: list[int]) -> list[int]:
    """Compute and write the states of some conversations, which no other call writes."""
    starts, lengths = spec.starts, spec.conversations.lengths
    ids, loss_mask, mask = (part.to(spec.target.device) for part in pad_ids(spec.conversations, group))
    states = run_target(spec.target, spec.taps, ids, loss_mask, mask, spec.dtype)
    for (name, file), part in zip(files.items(), (states.values, states.top, states.lse), strict=True):
        width, dtype = spec.columns[name]
        here = part.cpu()
        for row, index in enumerate(group):
            content = here[row, : lengths[index]].contiguous().view(torch.uint8).flatten().numpy().data
            pwrite_all(file.fileno(), content, int(starts[index]) * width * dtype.itemsize)
    return group


def open_or_build(spec: CacheSpec, root: Path, ranks: Ranks, progress: Progress | None = None) -> CachedFeatures:
    """The cache's reader; all ranks call it, and together build what is not there yet."""
    folder = spec.folder(root)
    if not ranks.share((folder / "key.json").is_file()):
        build(spec, folder, ranks, progress)
    return CachedFeatures(spec, folder)
