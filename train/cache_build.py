"""Computing the shards of a cache that are missing, by several processes at once, and finding those that are broken."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from train import shards
from train.batches import by_length
from train.cache_spec import CacheSpec
from train.claims import CAN_CLAIM, Claims
from train.features import pad_ids, run_target
from train.files import write_whole
from train.in_step import InStep
from train.ranks import Ranks
from train.spread import spread_target
from train.workers import side_by_side

BUILD_TOKENS = 4096  # padded tokens of one pass
POLL_SECONDS = 1.0  # while another run computes what is missing

Progress = Callable[[int, int], None]  # tokens done, tokens in all
Say = Callable[[str], None]


def check(spec: CacheSpec, folder: Path, ranks: Ranks, say: Say) -> list[int]:
    """Numbers of the shards that have to be computed; broken ones are named and removed. All processes call it."""
    mine = range(len(spec.ranges))[ranks.index :: ranks.count]
    wrong = {}
    for shard in mine:
        path = spec.path(folder, shard)
        if path.is_file():
            found = shards.fault(path, spec.about(shard), spec.storage.columns, spec.tokens(shard))
            if found:
                wrong[shard] = found
                shards.remove(path)
    for part in ranks.collect(wrong):
        for shard, what in part.items():
            say(f"states: {spec.path(folder, shard)} is damaged ({what}): it is computed again")
    return absent(spec, folder, ranks)


def absent(spec: CacheSpec, folder: Path, ranks: Ranks) -> list[int]:
    """Numbers of the shards that are not there, the same on every process."""
    missing = spec.missing(folder) if ranks.main else []
    found: list[int] = ranks.share(missing)
    return found


def build(spec: CacheSpec, folder: Path, ranks: Ranks, progress: Progress | None = None) -> None:
    """Compute the shards that are missing; all ranks call it, and all see ``folder``'s disk.

    Raises:
        OSError: not enough room on the disk (told before anything is computed), or writing failed. Shards that were
            finished stay.
    """
    missing = absent(spec, folder, ranks)
    total = sum(map(spec.tokens, missing))
    ranks.on_main(lambda: _make_room(spec, folder, missing), f"making {folder}")
    done = 0

    def passed(tokens: int) -> None:
        nonlocal done
        done += tokens
        if progress:
            progress(done, -(-total // ranks.count))

    while missing:
        error: Exception | None = None
        made = 0
        with Claims(folder / "claims") as claims, InStep(spec.target, ranks) as steps:
            try:
                for shard in _order(missing, ranks):
                    with claims.take(shard) as mine:
                        if mine and not spec.path(folder, shard).is_file():
                            tensors = compute(spec, shard, passed)
                            shards.write(spec.path(folder, shard), tensors, spec.about(shard))
                            made += 1
            except Exception as caught:
                error = caught
            steps.along()
        failed = ranks.add([float(error is not None)])[0]
        if error is not None:
            raise error
        if failed:
            raise OSError(f"computing states failed on {int(failed)} of {ranks.count} processes")
        missing = absent(spec, folder, ranks)
        if missing and not ranks.add([made])[0]:
            time.sleep(POLL_SECONDS)  # another run is at it; should it die, its claims go with it


def _order(missing: list[int], ranks: Ranks) -> list[int]:
    """In which order a process tries shards: its own share first, then what the others have not come to."""
    own = missing[ranks.index :: ranks.count]
    return own + [shard for shard in missing if shard not in own] if CAN_CLAIM else own


def _make_room(spec: CacheSpec, folder: Path, missing: list[int]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    room, wanted = shutil.disk_usage(folder.parent).free, sum(map(spec.tokens, missing)) * spec.storage.token_bytes
    if wanted > room:
        raise OSError(
            f"the target's states need {wanted / 2**30:.2f} GiB in {folder.parent}, where {room / 2**30:.2f} GiB "
            "are free: set data.cache_folder to another disk, data.feature_dtype to float8_e4m3fn, or data.features "
            "to online"
        )
    folder.mkdir(exist_ok=True)
    with Claims(folder / "claims") as claims, claims.take(len(spec.ranges)) as mine:
        if mine and not (folder / "key.json").is_file():
            write_whole(folder / "key.json", json.dumps(spec.key, indent=1) + "\n")


def compute(spec: CacheSpec, shard: int, passed: Callable[[int], None]) -> dict[str, Tensor]:
    """A shard's states by column, (tokens, width) each; ``passed`` is told of tokens as they are done."""
    first, end = spec.ranges[shard]
    lengths = spec.conversations.lengths[first:end]
    starts, rows = np.cumsum(lengths) - lengths, int(lengths.sum())
    tensors = {name: torch.empty(rows, width, dtype=dtype) for name, (width, dtype) in spec.storage.columns.items()}

    def fill(group: list[int]) -> int:
        """Compute some conversations' states, whose rows no other call writes; says how many tokens they are."""
        padded = pad_ids(spec.conversations, [first + i for i in group])
        ids, loss_mask, _ = (part.to(spec.target.device) for part in padded)
        for name, values in run_target(spec.target, spec.taps, ids, loss_mask, spec.storage).items():
            here = values.cpu()
            for row, i in enumerate(group):
                tensors[name][starts[i] : starts[i] + lengths[i]] = here[row, : lengths[i]]
        return int(lengths[group].sum())

    groups, target = list(by_length(lengths, BUILD_TOKENS)), spec.target
    # passes of a spread target are made by all processes in one order
    for tokens in map(fill, groups) if spread_target(target) else side_by_side(fill, groups, target.device):
        passed(tokens)
    return tensors
