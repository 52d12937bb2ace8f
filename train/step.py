"""One optimizer step: passes over its micro-batches, then clipping and the optimizer.

A step's loss is (sum over all micro-batches and processes of ``LossReport.total``) / (sum of the counts). The counts
follow from the loss masks, so their sum is known before the first forward pass, and each micro-batch contributes its
share to the gradient whatever its size::

    count = Σ over processes and micro-batches          one small all-reduce
    each micro-batch:  backward(total · processes / count)      (data parallel averages over processes)
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from heads.base import DraftHeads, LossReport
from heads.judge import Criterion, TrainingBatch
from train.batches import Micro, split_step
from train.config import RunConfig
from train.features import FeatureSource
from train.figures import Sums
from train.ranks import Ranks


class Step(nn.Module):
    """What data parallelism wraps: heads, criterion and weights of the draft positions; batch in, report out."""

    def __init__(self, heads: DraftHeads, criterion: Criterion, weights: list[float]) -> None:
        super().__init__()
        self.heads, self.criterion, self.weights = heads, criterion, weights

    def forward(self, batch: TrainingBatch, measure: bool = True) -> LossReport:
        """See ``DraftHeads.loss``."""
        return self.heads.loss(batch, self.criterion, measure=measure, weights=self.weights)


@dataclass(frozen=True)
class Share:
    """What one process does in a step: its micro-batches, and the rows that count in each."""

    micros: list[Micro]
    counts: list[int]


class Stepper:
    """Optimizer steps of one run.

    Args:
        source: states of the target for the conversations that are trained on.
        model, optimizer: as ``Accelerator.prepare`` returned them, the model a :class:`Step`.

    Attributes:
        sums: loss and acceptance since they were last read.
    """

    def __init__(
        self,
        config: RunConfig,
        accelerator: Accelerator,
        heads: DraftHeads,
        source: FeatureSource,
        model: Any,
        optimizer: Any,
    ) -> None:
        self.config, self.accelerator, self.heads, self.source = config, accelerator, heads, source
        self.model, self.optimizer = model, optimizer
        self.parameters = [p for p in heads.parameters() if p.requires_grad]
        self.ranks, self.sums = Ranks(accelerator), Sums()
        self.deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED

    def share(self, indices: list[int]) -> Share:
        """This process's part of a step on these conversations."""
        self.model.train()  # before anything is counted: heads may leave rows out of what they train on
        settings, lengths = self.config.train, self.source.conversations.lengths
        shares = split_step(indices, lengths, settings.micro_tokens, self.ranks.count, packing=settings.packing)
        micros = shares[self.ranks.index]
        return Share(micros, [self._rows(micro) for micro in micros])

    def run(self, share: Share, total: float, lr: float, measure: bool) -> None:
        """Take the step.

        Args:
            total: rows that count, over all processes.
            measure: also find acceptance, which costs passes over the vocabulary.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for number, (micro, count) in enumerate(zip(share.micros, share.counts, strict=True), 1):
            last = number == len(share.micros)
            self.accelerator.sync_gradients = last
            with nullcontext() if last else self.accelerator.no_sync(self.model):
                report: LossReport = self.model(self.batch(self.source, micro.indices), measure)
                if int(report.count) != count and micro.counts:
                    raise RuntimeError(f"heads count {int(report.count)} rows where the masks have {count}")
                self.sums.add(report, counts=micro.counts, measured=measure)
                part = float(micro.counts) * self.ranks.count / max(total, 1.0)
                self.accelerator.backward(report.total * part)
        if not self.deepspeed:  # its engine clips and steps in the last backward
            if self.config.train.clip:
                self.accelerator.clip_grad_norm_(self.parameters, self.config.train.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _rows(self, micro: Micro) -> int:
        masks = (self.source.conversations.loss_mask(i) for i in micro.indices if micro.counts)
        return sum(int(self.heads.count(mask[None])) for mask in masks)

    def batch(self, source: FeatureSource, indices: tuple[int, ...]) -> TrainingBatch:
        """States in the dtypes that heads and target compute in."""
        batch = source.batch(indices)
        batch.taps = batch.taps.to(self.parameters[0].dtype)
        batch.hidden = batch.hidden.to(self.heads.target.dtype)
        return batch
