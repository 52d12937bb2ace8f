"""What a planned run is made of, and its bytes on disk: exactly those of states, heads and optimizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data.pack import plan
from heads.base import DraftHeads
from train.batches import split_step
from train.cache import CacheSpec
from train.cache_wider import wider
from train.config import RunConfig
from train.conversations import Conversations
from train.estimate import stored_bytes
from train.loop import plan_of
from train.optimizer import ADAMW, MOMENTS, MUON, parted
from train.row_muon import ROWS

Shape = tuple[int, int]  # rows of a pass, and the tokens they are padded to


@dataclass(frozen=True)
class StepPlan:
    """The first epoch's steps.

    Attributes:
        steps: how many.
        tokens: of all of them.
        micro_batches: fewest and most passes of a process in a step.
        shapes: every pass's.
        evaluations, saves: optimizer steps between them; 0 for at the end only.
    """

    steps: int
    tokens: int
    micro_batches: tuple[int, int]
    shapes: frozenset[Shape]
    evaluations: int
    saves: int

    def line(self, total: int, processes: int) -> str:
        """For people."""
        fewest, most = self.micro_batches
        passes = f"{most}" if fewest == most else f"{fewest} to {most}"
        each = f"every {self.evaluations} steps" if self.evaluations else "at the end"
        return (
            f"{total:,} of about {self.tokens // self.steps:,} tokens, {total / self.steps:.2f} epochs of "
            f"{self.steps:,}; {passes} passes a step on each of {processes} "
            f"{'process' if processes == 1 else 'processes'}; evaluated {each}"
        )

    def to_dict(self, total: int) -> dict[str, Any]:
        """For JSON."""
        return {
            "epoch": self.steps,
            "epochs": total / self.steps,
            "tokens_per_step": self.tokens // self.steps,
            "micro_batches": list(self.micro_batches),
        }


def plan_steps(config: RunConfig, conversations: Conversations, processes: int) -> StepPlan:
    """What the first epoch is made of on so many processes."""
    settings, lengths = config.train, conversations.lengths
    steps = plan_of(settings, lengths, 0)
    counts, shapes = [], set()
    for step in steps:
        shares = split_step(step, lengths, settings.micro_tokens, processes, packing=settings.packing)
        counts.append(len(shares[0]))
        shapes |= {
            _shape(lengths[list(micro.indices)].tolist(), settings.packing) for share in shares for micro in share
        }
    return StepPlan(
        len(steps),
        int(lengths.sum()),
        (min(counts), max(counts)),
        frozenset(shapes),
        config.eval.every,
        settings.save_every,
    )


def _shape(lengths: list[int], packing: bool) -> Shape:
    longest = max(lengths)
    return (len(plan(lengths, longest)) if packing else len(lengths)), longest


@dataclass(frozen=True)
class DiskNeeds:
    """Bytes to be written.

    Attributes:
        prepared: of prepared conversations in the run folder.
        states: name → bytes of states to be computed into the cache; found: of those that are there.
        heads: of heads/; checkpoint: of one checkpoint's weights and optimizer.
        checkpoints: how many there are at most, one being written included.
    """

    prepared: int
    states: dict[str, int]
    found: dict[str, int]
    heads: int
    checkpoint: int
    checkpoints: int

    @classmethod
    def of(
        cls, config: RunConfig, heads: DraftHeads, caches: Sequence[tuple[str, CacheSpec, Path]], prepared: int
    ) -> DiskNeeds:
        """See the class."""
        missing = {
            name: 0 if wider(spec, folder.parent) else spec.missing_bytes(folder) for name, spec, folder in caches
        }
        found = {name: spec.bytes - missing[name] for name, spec, _ in caches}
        written = _heads_bytes(heads)
        evaluated = bool(config.eval.conversations or config.eval.prompts)
        return cls(
            prepared=prepared,
            states={name: count for name, count in missing.items() if count},
            found={name: count for name, count in found.items() if count},
            heads=written,
            checkpoint=written + _optimizer_bytes(config, heads),
            checkpoints=config.output.keep + 1 + evaluated,
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        parts = {
            **{f"states of the target, {name}": count for name, count in self.states.items()},
            f"checkpoints, {self.checkpoints} of {self.checkpoint:,} bytes at most": self.checkpoints * self.checkpoint,
            "heads": self.heads,
            "prepared conversations": self.prepared,
        }
        return {"total": sum(parts.values()), "parts": parts, **vars(self)}


def _heads_bytes(heads: DraftHeads) -> int:
    """Of config.json and heads.safetensors."""
    tensors = {name: (tuple(value.shape), value.dtype) for name, value in heads.state_dict().items()}
    config = len((json.dumps(heads.config.to_dict(), indent=2) + "\n").encode())
    return stored_bytes(tensors, {"format": "pt"}) + config


def _optimizer_bytes(config: RunConfig, heads: DraftHeads) -> int:
    """Of the optimizer's state in a checkpoint."""
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    trained = [p for p in heads.parameters() if p.requires_grad]
    parts = parted(config.train, heads, trained)
    for index, (part, parameter) in enumerate((name, p) for name, weights in parts.items() for p in weights):
        if part == ADAMW:
            tensors[f"{index}.step"] = ((), torch.float32)
        for name in MOMENTS[part]:
            tensors[f"{index}.{name}"] = (tuple(parameter.shape), parameter.dtype)
        if part == MUON and config.train.row_beta:
            tensors[f"{index}.{ROWS}"] = ((len(parameter), 1), parameter.dtype)
    return stored_bytes(tensors)
