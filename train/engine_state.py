"""Weights, optimizer and generators in a checkpoint: what each process writes and reads.

Weights are a heads folder, the optimizer's state is in safetensors by parameter number, whatever engine they come from;
and each process has a file of its own for what only it knows: its random generators, and sums that were not logged yet.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from heads.store import WEIGHTS, read_tensors
from train.engine import Engine
from train.figures import Sums
from train.ranks import Ranks

HEADS, OPTIMIZER = "heads", "optimizer.safetensors"


class EngineState:
    """Weights and optimizer of an engine, to disk and back; all processes call both."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.ranks = engine, Ranks(engine.accelerator)

    def write(self, folder: Path) -> None:
        """Into a checkpoint's folder, which exists."""
        heads, moments = self.engine.whole_heads(), self.engine.moments()
        if self.ranks.main:
            heads.save_pretrained(folder / HEADS)
            save_file(moments, folder / OPTIMIZER)

    def read(self, folder: Path) -> None:
        """Back into the engine, which may be another one, on other processes."""
        weights = read_tensors(folder / HEADS / WEIGHTS, self.engine.expected)
        self.engine.restore(weights, load_file(folder / OPTIMIZER))


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
