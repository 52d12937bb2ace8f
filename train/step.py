"""One optimizer step: passes over its micro-batches, guards, clipping, the optimizer.

A step's loss is (sum over all micro-batches and processes of ``LossReport.total``) / (sum of the counts). The counts
follow from the loss masks, so their sum is known before the first forward pass, and each micro-batch contributes its
share to the gradient whatever its size::

    count = Σ over processes and micro-batches          one small all-reduce
    each micro-batch:  backward(total · processes / count)      (data parallel averages over processes)

Before gradients are averaged, all processes agree that every loss is finite; before the optimizer moves, that the
gradient is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

from heads.base import DraftHeads, LossReport
from heads.judge import Criterion, TrainingBatch
from train.batches import Micro, split_step
from train.config import RunConfig
from train.features import FeatureSource
from train.figures import Sums
from train.guards import BadBatch, is_finite, memory_advice, refuse_not_finite
from train.optimizer import FACTOR
from train.ranks import Ranks

if TYPE_CHECKING:
    from train.engine import Engine

Supply = Callable[[], TrainingBatch]


class HeadsStep(nn.Module):
    """Heads, criterion and weights of the draft positions: batch in; out the sum to differentiate, and the report.

    Args:
        precision: "bf16" for autocast, "no" for none.
    """

    def __init__(self, heads: DraftHeads, criterion: Criterion, weights: list[float], precision: str) -> None:
        super().__init__()
        self.heads, self.criterion, self.weights, self.casts = heads, criterion, weights, precision == "bf16"

    def forward(
        self, batch: TrainingBatch, measure: bool = True, taps: Tensor | None = None
    ) -> tuple[Tensor, LossReport]:
        """See ``DraftHeads.loss``; ``taps`` go before the batch's, where an engine has to see them."""
        if taps is not None:
            batch = replace(batch, taps=taps)
        with torch.autocast(batch.ids.device.type, torch.bfloat16, enabled=self.casts):
            report = self.heads.loss(batch, self.criterion, measure=measure, weights=self.weights)
        return report.total, report


class Step(nn.Module):
    """What an engine is given: the heads' step, and the target's layers where they are to be the engine's too.

    The batch is made inside its pass, because then an engine that spreads weights lets the target run.

    Attributes:
        watched: the engine tells by the gradient of what the heads read that their backward pass is over.
    """

    watched = False

    def __init__(self, inner: HeadsStep, layers: nn.Module | None = None) -> None:
        super().__init__()
        self.inner, self.layers = inner, layers

    def forward(self, supply: Supply, measure: bool = True) -> tuple[Tensor, LossReport]:
        """See :class:`HeadsStep`."""
        batch = supply()
        taps = batch.taps.detach().requires_grad_(self.training) if self.watched else None
        total, report = self.inner(batch, measure, taps)
        return total, report

    def train(self, mode: bool = True) -> Self:
        """The target stays in eval mode."""
        super().train(mode)
        if self.layers is not None:
            self.layers.eval()
        return self


@dataclass(frozen=True)
class Share:
    """What one process does in a step: its micro-batches, and the rows that count in each."""

    micros: list[Micro]
    counts: list[int]


class Stepper:
    """Optimizer steps of one run.

    Args:
        source: states of the target for the conversations that are trained on.
        engine: what runs the passes.

    Attributes:
        sums: loss and acceptance since they were last read.
        grad_norm: of the last step, before it was clipped; None where the engine does not tell.
    """

    def __init__(
        self,
        config: RunConfig,
        heads: DraftHeads,
        source: FeatureSource,
        engine: Engine,
    ) -> None:
        self.config, self.heads, self.source, self.engine = config, heads, source, engine
        self.ranks, self.sums = Ranks(engine.accelerator), Sums()
        self.grad_norm: float | None = None
        self.folder = Path(config.output.folder)
        self.heads_dtype = engine.parameters[0].dtype

    def expect(self, steps: list[list[int]]) -> None:
        """Tell the source of this process's batches in the steps to come."""
        self.source.expect([micro.indices for step in steps for micro in self._micros(step)])

    def _micros(self, indices: list[int]) -> list[Micro]:
        lengths, settings = self.source.conversations.lengths, self.config.train
        shares = split_step(indices, lengths, settings.micro_tokens, self.ranks.count, packing=settings.packing)
        return shares[self.ranks.index]

    def share(self, indices: list[int]) -> Share:
        """This process's part of a step on these conversations."""
        self.engine.model.train()  # before anything is counted: heads may leave rows out of what they train on
        micros = self._micros(indices)
        return Share(micros, [self._rows(micro) for micro in micros])

    def run(self, share: Share, total: float, number: int, lr: float, measure: bool) -> None:
        """Take the step.

        Args:
            total: rows that count, over all processes.
            number: of the step, counted from 1.
            measure: also find acceptance, which costs passes over the vocabulary.

        Raises:
            ValueError: the loss or its gradient is not finite on some process; raised on all, before the weights move
                (DeepSpeed tells of a gradient only after that).
            OutOfMemory: a pass did not fit.
        """
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr * group.get(FACTOR, 1.0)
        bad: list[BadBatch] = []
        for at, (micro, count) in enumerate(zip(share.micros, share.counts, strict=True), 1):
            last = at == len(share.micros)
            with memory_advice(self._where(number, micro), self._lower()), self.engine.accumulating(last):
                loss, report = self.engine.model(partial(self.batch, self.source, micro.indices), measure)
                if int(report.count) != count and micro.counts:
                    raise RuntimeError(f"heads count {int(report.count)} rows where the masks have {count}")
                if not is_finite(loss.detach()):
                    bad.append(self._bad(at, micro, str(float(loss.detach()))))
                if last and self.ranks.add([len(bad)])[0]:
                    refuse_not_finite(self.folder, number, "loss", bad, lr, self.ranks)
                self.sums.add(report, counts=micro.counts, measured=measure)
                part = float(micro.counts) * self.ranks.count / max(total, 1.0)
                self.engine.backward(loss * part)
        self.grad_norm = self.engine.clip(self.config.train.clip)
        if not is_finite(self.grad_norm):
            every = [self._bad(at, micro, "finite loss") for at, micro in enumerate(share.micros, 1)]
            refuse_not_finite(self.folder, number, "gradient", every, lr, self.ranks, taken=self.engine.takes_early)
        self.engine.update()

    def _bad(self, at: int, micro: Micro, loss: str) -> BadBatch:
        rows = [self.source.conversations.row_id(index) for index in micro.indices]
        return BadBatch(self.ranks.index, at, loss, rows)

    def _where(self, number: int, micro: Micro) -> str:
        longest = int(max(self.source.conversations.lengths[list(micro.indices)]))
        return (
            f"in step {number}, in a pass over {len(micro.indices)} conversations of up to {longest} tokens "
            f"({longest * len(micro.indices):,} padded)"
        )

    def _lower(self) -> str:
        return (
            f"lower train.micro_tokens (now {self.config.train.micro_tokens}; the result stays the same); if one "
            "conversation is too long, lower data.max_length; a smaller heads.draft_vocab_size, train.precision bf16 "
            "and data.features cached need less too"
        )

    def _rows(self, micro: Micro) -> int:
        masks = (self.source.conversations.loss_mask(i) for i in micro.indices if micro.counts)
        return sum(int(self.heads.count(mask[None])) for mask in masks)

    def batch(self, source: FeatureSource, indices: tuple[int, ...]) -> TrainingBatch:
        """States in the dtypes that heads and target compute in."""
        batch = source.batch(indices)
        batch.taps = batch.taps.to(self.heads_dtype)
        batch.hidden = batch.hidden.to(self.heads.target.dtype)
        return batch
