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

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
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
from train.guards import BadBatch, is_finite, memory_advice, refuse_not_finite
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
        grad_norm: of the last step, before it was clipped; None where the engine does not tell.
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
        self.grad_norm: float | None = None
        self.folder = Path(config.output.folder)
        self.deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED

    def share(self, indices: list[int]) -> Share:
        """This process's part of a step on these conversations."""
        self.model.train()  # before anything is counted: heads may leave rows out of what they train on
        settings, lengths = self.config.train, self.source.conversations.lengths
        shares = split_step(indices, lengths, settings.micro_tokens, self.ranks.count, packing=settings.packing)
        micros = shares[self.ranks.index]
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
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        bad: list[BadBatch] = []
        for at, (micro, count) in enumerate(zip(share.micros, share.counts, strict=True), 1):
            last = at == len(share.micros)
            self.accelerator.sync_gradients = last
            with (
                memory_advice(self._where(number, micro), self._lower()),
                nullcontext() if last else self.accelerator.no_sync(self.model),
            ):
                report: LossReport = self.model(self.batch(self.source, micro.indices), measure)
                if int(report.count) != count and micro.counts:
                    raise RuntimeError(f"heads count {int(report.count)} rows where the masks have {count}")
                if not is_finite(report.total.detach()):
                    bad.append(self._bad(at, micro, str(float(report.total.detach()))))
                if last and self.ranks.add([len(bad)])[0]:
                    refuse_not_finite(self.folder, number, "loss", bad, lr, self.ranks)
                self.sums.add(report, counts=micro.counts, measured=measure)
                part = float(micro.counts) * self.ranks.count / max(total, 1.0)
                self.accelerator.backward(report.total * part)
        # DeepSpeed's engine has clipped and stepped in the last backward, and only tells the norm
        norm = self.accelerator.clip_grad_norm_(self.parameters, self.config.train.clip or float("inf"))
        self.grad_norm = None if norm is None else float(norm)
        if not is_finite(self.grad_norm):
            every = [self._bad(at, micro, "finite loss") for at, micro in enumerate(share.micros, 1)]
            refuse_not_finite(self.folder, number, "gradient", every, lr, self.ranks, taken=self.deepspeed)
        self.optimizer.step()
        self.optimizer.zero_grad()

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
        batch.taps = batch.taps.to(self.parameters[0].dtype)
        batch.hidden = batch.hidden.to(self.heads.target.dtype)
        return batch
