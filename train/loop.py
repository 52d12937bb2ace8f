"""The training loop: optimizer steps exact by counts, evaluations that really decode, checkpoints, a clean stop.

A step's loss is (sum over all micro-batches and processes of ``LossReport.total``) / (sum of the counts). The counts
follow from the loss masks, so their sum is known before the first forward pass, and each micro-batch contributes its
share to the gradient whatever its size::

    count = Σ over processes and micro-batches          one small all-reduce
    each micro-batch:  backward(total · processes / count)      (data parallel averages over processes)
"""

from __future__ import annotations

import json
import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from heads.base import DraftHeads, LossReport
from heads.judge import Criterion, TrainingBatch
from train.batches import Micro, plan_epoch, split_step
from train.checkpoint import Checkpoints, Progress
from train.config import RunConfig
from train.evaluation import Evaluation, evaluate
from train.features import FeatureSource
from train.figures import Figures, Sums
from train.interrupt import Interrupted, StopRequest
from train.losses import make_criterion, position_weights
from train.progress import Bar, Reporter, duration
from train.ranks import Ranks
from train.schedule import learning_rate
from train.settings import to_dict

# A run may be continued with these changed: they do not touch what has been learned so far.
FREE_TO_CHANGE = {
    "data.features", "data.cache_folder", "train.micro_tokens", "train.packing", "train.log_every", "train.save_every",
    "train.epochs", "train.max_steps", "target.trust_remote_code",
}  # fmt: skip


class Step(nn.Module):
    """What data parallelism wraps: heads, criterion and weights of the draft positions; batch in, report out."""

    def __init__(self, heads: DraftHeads, criterion: Criterion, weights: list[float]) -> None:
        super().__init__()
        self.heads, self.criterion, self.weights = heads, criterion, weights

    def forward(self, batch: TrainingBatch, measure: bool = True) -> LossReport:
        """See ``DraftHeads.loss``."""
        return self.heads.loss(batch, self.criterion, measure=measure, weights=self.weights)


class Trainer:
    """One run.

    Args:
        heads: in the dtype they are trained in, on the device.
        train, heldout: states of the target; no held-out conversations means no evaluation.
    """

    def __init__(
        self,
        config: RunConfig,
        accelerator: Accelerator,
        heads: DraftHeads,
        train: FeatureSource,
        heldout: FeatureSource | None,
        reporter: Reporter,
    ) -> None:
        self.config, self.accelerator, self.heads = config, accelerator, heads
        self.train, self.heldout, self.reporter = train, heldout, reporter
        self.ranks, self.progress = Ranks(accelerator), Progress()
        self.lengths = train.conversations.lengths
        self.deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
        with_gradients = [name for name, p in heads.target.model.named_parameters() if p.requires_grad]
        assert not with_gradients, f"the target must be frozen, but {with_gradients[0]} takes gradients"
        self.parameters = [p for p in heads.parameters() if p.requires_grad]
        settings = config.train
        optimizer = torch.optim.AdamW(
            self.parameters, lr=settings.lr, betas=(settings.beta1, settings.beta2), weight_decay=settings.weight_decay
        )
        weights = position_weights(settings.position_weights, heads.position_weights())
        self.model, self.optimizer = accelerator.prepare(Step(heads, make_criterion(settings.loss), weights), optimizer)
        self.folder = Path(config.output.folder)
        self.checkpoints = Checkpoints(
            self.folder / "checkpoints",
            accelerator,
            self.model,
            self.optimizer,
            heads,
            {**continued_settings(config), "data.content": train.conversations.digest},
            config.output.keep,
        )
        self.total = settings.max_steps or sum(len(self.plan(epoch)) for epoch in range(settings.epochs))
        self.sums, self.tokens, self.since = Sums(), 0, time.monotonic()
        self.figures: Figures | None = None
        self.evaluation: Evaluation | None = None

    def plan(self, epoch: int) -> list[list[int]]:
        """Conversations of each optimizer step of an epoch."""
        settings = self.config.train
        return plan_epoch(self.lengths, settings.batch_tokens, settings.bucket, settings.seed, epoch)

    def run(self) -> None:
        """Train to the last step, from the newest checkpoint if there is one.

        Raises:
            Interrupted: a signal came; a checkpoint was written.
            ValueError: the loss is not finite.
            OSError: a checkpoint could not be written.
        """
        self._resume()
        plan = self.plan(self.progress.epoch)
        bar = self.reporter.bar("training", self.total, "steps", self.progress.step)
        with StopRequest() as stop, bar:
            while self.progress.step < self.total:
                if self.progress.batch == len(plan):
                    self.progress.epoch, self.progress.batch = self.progress.epoch + 1, 0
                    plan = self.plan(self.progress.epoch)
                self.optimizer_step(plan[self.progress.batch], stop)
                self.progress.step += 1
                self.progress.batch += 1
                self._after_step(stop, bar)
            if self.evaluation is None and self.heldout is not None:
                self._evaluate(stop)  # a run continued at its very end
            self.checkpoints.save(self.progress)

    def _resume(self) -> None:
        newest = self.ranks.share(self.checkpoints.newest())
        if newest is None:
            return
        if not self.config.output.resume:
            raise ValueError(
                f"{newest.parent} has a checkpoint and output.resume is false: choose another output.folder, "
                "or set output.resume to true to go on with it"
            )
        self.progress = self.checkpoints.load(newest)
        self.reporter.say(f"resumed: step {self.progress.step} of {self.total}, from {newest}")
        if self.ranks.main:
            self._cut_log()

    def optimizer_step(self, indices: list[int], stop: StopRequest) -> None:
        """One step on these conversations, shared between processes and micro-batches."""
        self.model.train()  # before anything is counted: heads may leave rows out of what they train on
        settings = self.config.train
        shares = split_step(indices, self.lengths, settings.micro_tokens, self.ranks.count, packing=settings.packing)
        mine = shares[self.ranks.index]
        counts = [self._rows(micro) for micro in mine]
        total, *signals = self.ranks.add([sum(counts), *(float(stop.number == n) for n in StopRequest.NUMBERS)])
        self._stop_if(signals)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.progress.step, self.total, self.config.train)
        # acceptance costs passes over the vocabulary: it is measured on the steps that are logged
        measure = self._logs(self.progress.step + 1)
        for number, (micro, count) in enumerate(zip(mine, counts, strict=True), 1):
            last = number == len(mine)
            self.accelerator.sync_gradients = last
            with nullcontext() if last else self.accelerator.no_sync(self.model):
                report: LossReport = self.model(self._batch(self.train, micro.indices), measure)
                if int(report.count) != count and micro.counts:
                    raise RuntimeError(f"heads count {int(report.count)} rows where the masks have {count}")
                self.sums.add(report, counts=micro.counts, measured=measure)
                share = float(micro.counts) * self.ranks.count / max(total, 1.0)
                self.accelerator.backward(report.total * share)
        if not self.deepspeed:  # its engine clips and steps in the last backward
            if self.config.train.clip:
                self.accelerator.clip_grad_norm_(self.parameters, self.config.train.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.tokens += int(self.lengths[indices].sum())

    def _rows(self, micro: Micro) -> int:
        masks = (self.train.conversations.loss_mask(i) for i in micro.indices if micro.counts)
        return sum(int(self.heads.count(mask[None])) for mask in masks)

    def _batch(self, source: FeatureSource, indices: tuple[int, ...]) -> TrainingBatch:
        """States in the dtypes that heads and target compute in."""
        batch = source.batch(indices)
        batch.taps = batch.taps.to(self.parameters[0].dtype)
        batch.hidden = batch.hidden.to(self.heads.target.dtype)
        return batch

    def _stop_if(self, signals: list[float]) -> None:
        for number, seen in zip(StopRequest.NUMBERS, signals, strict=True):
            if seen:
                raise Interrupted(number, self.progress.step, self.checkpoints.save(self.progress))

    def _after_step(self, stop: StopRequest, bar: Bar) -> None:
        step, settings = self.progress.step, self.config
        final = step == self.total
        if self._logs(step):
            self._log(bar)
        else:
            bar.update(step, self._rate())
        if self.heldout is not None and (final or (settings.eval.every and step % settings.eval.every == 0)):
            self._evaluate(stop)
            self.checkpoints.save(self.progress)
        elif final or (settings.train.save_every and step % settings.train.save_every == 0):
            self.checkpoints.save(self.progress)

    def _logs(self, step: int) -> bool:
        return step == self.total or step % self.config.train.log_every == 0

    def _rate(self) -> str:
        return f"{self.tokens / max(1e-9, time.monotonic() - self.since):,.0f} tokens/s"

    def _log(self, bar: Bar) -> None:
        figures = self.figures = self.sums.figures(self.ranks)
        step, rate = self.progress.step, self._rate()
        lr = learning_rate(step - 1, self.total, self.config.train)
        per_second = self.tokens / max(1e-9, time.monotonic() - self.since)
        self.tokens, self.since = 0, time.monotonic()
        bar.update(step, rate)
        bar.quiet()
        self.reporter.say(
            f"step {step}/{self.total}  {_line(figures)}  lr {lr:.2e}  {rate}  {duration(bar.left(step))} left"
        )
        values = figures.flat("train") | {"train/lr": lr, "train/tokens_per_second": per_second}
        self._record(values)
        if not math.isfinite(figures.loss):
            raise ValueError(f"the loss is {figures.loss} at step {step}: lower train.lr, or set train.clip")

    def _evaluate(self, stop: StopRequest) -> None:
        assert self.heldout is not None
        result = evaluate(self.config, self.accelerator, self.model, self.heads, self.heldout, self._batch, stop)
        self._stop_if(self.ranks.add([float(stop.number == n) for n in StopRequest.NUMBERS]))
        self.evaluation = result
        self.since = time.monotonic()  # the rate is of training alone
        for line in result.lines():
            self.reporter.say(f"step {self.progress.step}/{self.total}  {line}")
        self._record(result.flat())
        score = result.score
        if score > self.progress.best:
            self.progress.best, self.progress.best_step = score, self.progress.step

    def _record(self, values: dict[str, float]) -> None:
        """To the tracker and to log.jsonl."""
        self.accelerator.log(values, step=self.progress.step)
        if self.ranks.main:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": self.progress.step, **values}) + "\n")

    def _cut_log(self) -> None:
        """Drop what an interrupted run logged after the checkpoint it goes on from."""
        path = self.folder / "log.jsonl"
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= self.progress.step]
            path.write_text("".join(kept), encoding="utf-8")


def continued_settings(config: RunConfig) -> dict[str, Any]:
    """``section.key`` → value of all that must be equal for a run to be continued."""
    flat = {
        f"{section}.{key}": value
        for section, values in to_dict(config).items()
        if section in ("data", "target", "heads", "train")
        for key, value in values.items()
    }
    return {name: value for name, value in flat.items() if name not in FREE_TO_CHANGE}


def _line(figures: Figures) -> str:
    terms = "  ".join(
        f"{name} {' '.join(f'{value:.3f}' for value in values)}" for name, values in figures.terms.items()
    )
    accepted = " ".join(f"{value:.3f}" for value in figures.acceptance)
    return f"loss {figures.loss:.4f}  {terms}  accepted {accepted}"
