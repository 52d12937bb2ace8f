"""Memory that a process of a planned run will need: what stands in it all the time, and the highest moment.

Weights, gradients and optimizer are exact. A pass of the heads, forward and backward, and one of the target are
measured on short texts (:mod:`train.estimate`). ZeRO and FSDP need less, since each process holds a part only.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator

from heads.base import DraftHeads
from heads.judge import TrainingBatch
from train.batches import by_length
from train.cache_build import BUILD_TOKENS
from train.config import RunConfig
from train.conversations import Conversations
from train.estimate import PassMemory, nbytes, peak_of
from train.features import run_target
from train.losses import make_criterion
from train.memory import available_bytes, resident_bytes
from train.needs import StepPlan
from train.optimizer import MOMENTS, parted
from train.storage import Storage


class MemoryNeeds:
    """Made before the target is loaded, so that it knows what the process held without it."""

    def __init__(self, accelerator: Accelerator, config: RunConfig, device: torch.device | None = None) -> None:
        self.accelerator, self.config = accelerator, config
        self.device = device or accelerator.device
        self.base = resident_bytes() if self.device.type == "cpu" else 0
        self.available = 0 if self.device.type == "meta" else available_bytes(self.device)

    def of(self, heads: DraftHeads, plan: StepPlan, conversations: Conversations) -> dict[str, Any]:
        """Bytes by part, their sum at the highest moment, and what is free."""
        model = heads.target.model
        trained = [p for p in heads.parameters() if p.requires_grad]
        weights = nbytes(heads.state_dict().values())
        moved = parted(self.config.train, heads, trained)
        several = self.accelerator.num_processes > 1
        parts = {
            "process without the target": self.base,
            "target": nbytes({id(t): t for t in (*model.parameters(), *model.buffers())}.values()),
            "heads": weights,
            "gradients": nbytes(trained) * (2 if several else 1),  # data parallelism has buckets of its own
            "optimizer": sum(len(MOMENTS[name]) * nbytes(part) for name, part in moved.items()),
        }
        share = conversations.answer_tokens / int(conversations.lengths.sum())
        take, judge = self.training_pass(heads, share), self.states_pass(heads, share)
        training = PassMemory(lambda length: peak_of(lambda: take(length), heads.target.device))
        heads.zero_grad()
        states = PassMemory(lambda length: peak_of(lambda: judge(length), heads.target.device))
        passes, at_once = list(plan.shapes), 1
        if self.config.data.features == "cached":  # built by one pass a core
            groups = by_length(conversations.lengths, BUILD_TOKENS)
            passes = [(len(group), int(conversations.lengths[group].max())) for group in groups]
            at_once = torch.get_num_threads() if self.device.type == "cpu" else 1
        longest = max(plan.shapes, key=lambda shape: training(*shape))
        moments = {
            f"training pass of {longest[0]} × {longest[1]} tokens": training(*longest)
            + _batch(self.config, heads, *longest),
            "computing the target's states": at_once * max(states(*shape) for shape in passes),
            "writing a checkpoint": 2 * nbytes(trained) if self.device.type == "cpu" else 0,
        }
        highest = max(moments, key=lambda name: moments[name])
        return {
            "total": sum(parts.values()) + moments[highest],
            "parts": parts | {f"{highest} (the highest moment)": moments[highest]},
            "moments": moments,
            "available": self.available,
        }

    def training_pass(self, heads: DraftHeads, share: float) -> Callable[[int], None]:
        """A pass of the heads over one text of a length, forward and backward; ``share`` of it is the target's own."""
        criterion, device = make_criterion(self.config.train.loss), heads.target.device
        half = self.config.train.precision == "bf16" and device.type != "meta"  # which knows no autocast
        heads.train()

        def take(length: int) -> None:
            batch = made_up(heads, length, share)
            with torch.autocast(device.type, torch.bfloat16, enabled=half) if half else nullcontext():
                total = heads.loss(batch, criterion).total
            total.backward()

        take(16)  # gradients are there, and caches warm
        return take

    def states_pass(self, heads: DraftHeads, share: float) -> Callable[[int], None]:
        """A pass of the target over one text of a length, what is stored of it included."""
        target, taps = heads.target, tuple(heads.config.taps)
        storage = Storage(len(taps), target.hidden_size, getattr(torch, self.config.data.feature_dtype))

        def take(length: int) -> None:
            batch = made_up(heads, length, share, states=False)
            run_target(target, taps, batch.ids, batch.loss_mask, storage)

        take(16)
        return take


def made_up(heads: DraftHeads, length: int, share: float, states: bool = True) -> TrainingBatch:
    """One text of a length, of which this share at its end is the target's own."""
    target, device = heads.target, heads.target.device
    ids = torch.arange(length, device=device)[None] % target.vocab_size
    mask = torch.ones_like(ids, dtype=torch.bool)
    loss_mask = torch.arange(length, device=device)[None] >= min(length - 4, round(length * (1 - share)))
    width = target.hidden_size if states else 0
    dtype = next(heads.parameters()).dtype
    return TrainingBatch(
        ids=ids,
        loss_mask=loss_mask,
        mask=mask,
        taps=torch.zeros(1, length, width * len(heads.config.taps), dtype=dtype, device=device),
        hidden=torch.zeros(1, length, width, dtype=target.dtype, device=device),
        top=torch.zeros_like(ids),
        lse=torch.zeros(1, length, device=device),
    )


def _batch(config: RunConfig, heads: DraftHeads, texts: int, length: int) -> int:
    """Bytes of a batch's states: as stored, with padding zeroed, and in the dtypes they are computed in."""
    stored = getattr(torch, config.data.feature_dtype).itemsize
    taps, width = len(heads.config.taps), heads.target.hidden_size
    own, theirs = next(heads.parameters()).element_size(), heads.target.dtype.itemsize
    return texts * length * width * (2 * (taps + 1) * stored + taps * own + theirs)
