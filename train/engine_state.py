"""Weights, optimizer and generators in a checkpoint, by engine: what each process writes and reads.

Weights are a heads folder, the optimizer's state is in safetensors by parameter number, and each process has a file
of its own for what only it knows: its random generators, and sums that were not logged yet. DeepSpeed shards the
optimizer in its own files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors.torch import load_file, save_file
from torch import Tensor

from heads.base import DraftHeads
from heads.store import WEIGHTS, read_tensors
from train.figures import Sums
from train.ranks import Ranks

HEADS, OPTIMIZER, DEEPSPEED = "heads", "optimizer.safetensors", "deepspeed"


class EngineState(Protocol):
    """How one engine's weights and optimizer go to disk and back; all processes call both.

    Attributes:
        any_processes: whether what so many processes wrote can be read by another number.
    """

    any_processes: bool

    def write(self, folder: Path) -> None:
        """Into a checkpoint's folder, which exists."""

    def read(self, folder: Path) -> None:
        """Back into model and optimizer."""


class Plain:
    """Every process has all of it, so the main one writes it."""

    any_processes = True

    def __init__(self, model: Any, optimizer: Any, heads: DraftHeads, ranks: Ranks) -> None:
        self.optimizer, self.heads, self.ranks = optimizer, heads, ranks

    def write(self, folder: Path) -> None:
        """See :class:`EngineState`."""
        if self.ranks.main:
            self.heads.save_pretrained(folder / HEADS)
            save_file(_flatten(self.optimizer.state_dict()["state"]), folder / OPTIMIZER)

    def read(self, folder: Path) -> None:
        """See :class:`EngineState`."""
        self.heads.load_state_dict(read_tensors(folder / HEADS / WEIGHTS, self.heads.state_dict()))
        groups = self.optimizer.state_dict()["param_groups"]
        state = _unflatten(load_file(folder / OPTIMIZER))
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


class DeepSpeed:
    """Each process writes its shard of the optimizer, in DeepSpeed's own form."""

    any_processes = False

    def __init__(self, model: Any, optimizer: Any, heads: DraftHeads, ranks: Ranks) -> None:
        self.model, self.heads, self.ranks = model, heads, ranks

    def write(self, folder: Path) -> None:
        """See :class:`EngineState`."""
        self.model.save_checkpoint(str(folder / DEEPSPEED), tag="state")
        if self.ranks.main:
            self.heads.save_pretrained(folder / HEADS)

    def read(self, folder: Path) -> None:
        """See :class:`EngineState`."""
        self.model.load_checkpoint(str(folder / DEEPSPEED), tag="state")


ENGINES: dict[DistributedType, type[Plain] | type[DeepSpeed]] = {DistributedType.DEEPSPEED: DeepSpeed}


def engine_state(accelerator: Accelerator, model: Any, optimizer: Any, heads: DraftHeads) -> EngineState:
    """The one of the engine that runs.

    Args:
        model, optimizer: as ``Accelerator.prepare`` returned them.
        heads: the heads inside the model.
    """
    kind = ENGINES.get(accelerator.distributed_type, Plain)
    return kind(model, optimizer, heads, Ranks(accelerator))


def _flatten(state: dict[int, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{i}.{name}": value.cpu().contiguous() for i, entry in state.items() for name, value in entry.items()}


def _unflatten(tensors: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    return state


# what only one process knows


def _own(index: int) -> str:
    return f"process-{index}.safetensors"


def write_own(folder: Path, ranks: Ranks, sums: Sums) -> None:
    """This process's generators and sums."""
    states = {"generator": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["generator.cuda"] = torch.cuda.get_rng_state()
    if sums.values is not None:
        states["sums"] = sums.values
    save_file(states, folder / _own(ranks.index))


def read_own(folder: Path, ranks: Ranks, sums: Sums, processes: int, seed: tuple[int, int]) -> None:
    """Put them back. Of a checkpoint by another number of ``processes``, the main process takes over all sums, and
    generators that it does not hold begin anew from ``seed`` and the process's number."""
    path = folder / _own(ranks.index)
    own = load_file(path) if path.is_file() else {}
    if "generator" in own:
        torch.set_rng_state(own["generator"])
        if "generator.cuda" in own and torch.cuda.is_available():
            torch.cuda.set_rng_state(own["generator.cuda"])
    else:
        torch.manual_seed(int(np.random.SeedSequence([*seed, ranks.index]).generate_state(1, np.uint64)[0] >> 1))
    sums.values = own.get("sums")
    if processes != ranks.count:
        every = [load_file(folder / _own(index)).get("sums") for index in range(processes)] if ranks.main else []
        there = [part for part in every if part is not None]
        sums.values = torch.stack(there).sum(0) if there else None
