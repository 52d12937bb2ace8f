"""The training loop: optimizer steps exact by counts, evaluations that really decode, checkpoints, a clean stop."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from heads.base import DraftHeads
from train.batches import plan_epoch
from train.checkpoint import Checkpoints, Progress
from train.config import RunConfig, TrainConfig
from train.engine_state import EngineState
from train.engines import start_engine
from train.evaluation import evaluate
from train.features import FeatureSource
from train.figures import Figures
from train.guards import check_target, memory_advice
from train.interrupt import Interrupted, StopRequest
from train.kernels import use_in_heads
from train.losses import make_criterion, position_weights
from train.memory import peak_bytes
from train.optimizer import make_optimizer
from train.progress import Bar, Reporter, duration
from train.ranks import Ranks
from train.runlog import RunLog
from train.schedule import learning_rate
from train.settings import to_dict
from train.step import HeadsStep, Step, Stepper

# A run may be continued with these changed: they do not touch what has been learned so far.
FREE_TO_CHANGE = {
    "data.features", "data.cache_folder", "data.workers", "data.spool_folder", "data.ahead", "target.placement",
    "train.engine", "train.attention", "train.kernels", "train.micro_tokens", "train.packing", "train.log_every",
    "train.save_every", "train.epochs", "train.max_steps", "target.trust_remote_code",
}  # fmt: skip


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
        check_target(heads.target, getattr(torch, config.target.dtype))
        settings = config.train
        use_in_heads(settings, heads)
        weights = position_weights(settings.position_weights, heads.position_weights())
        inner = HeadsStep(heads, make_criterion(settings.loss), weights, settings.precision)
        step = Step(inner, heads.target.layers if config.target.placement == "inside" else None)
        self.engine = start_engine(config, accelerator, step, make_optimizer(settings, heads))
        self.stepper = Stepper(config, heads, train, self.engine)
        self.folder = Path(config.output.folder)
        self.log = RunLog(self.folder)
        self.checkpoints = Checkpoints(
            self.folder / "checkpoints",
            self.ranks,
            EngineState(self.engine),
            self.stepper.sums,
            {**continued_settings(config), "data.content": train.conversations.digest},
            other_settings(config),
            config.output.keep,
        )
        self.total = total_steps(settings, self.lengths)
        self.tokens, self.since = 0, time.monotonic()

    def plan(self, epoch: int) -> list[list[int]]:
        """Conversations of each optimizer step of an epoch."""
        return plan_of(self.config.train, self.lengths, epoch)

    def resume(self) -> None:
        """Go back to the newest whole checkpoint, if there is one, and cut the log to it.

        Raises:
            ValueError: the run may not be continued, or none of its checkpoints is whole.
        """
        newest = self.checkpoints.newest(self.reporter.say)
        if newest is not None and not self.config.output.resume:
            raise ValueError(
                f"{newest.parent} has a checkpoint and output.resume is false: choose another output.folder, "
                "or set output.resume to true to go on with it"
            )
        if newest is not None:
            self.progress, changed = self.checkpoints.load(newest, self.config.train.seed)
            self.reporter.say(f"resumed: step {self.progress.step} of {self.total}, from {newest}")
            for text in changed:
                self.reporter.say(f"changed: {text}")
        self.ranks.on_main(
            lambda: self.log.cut(self.progress.step, self.progress.log_bytes), f"cutting {self.log.path}"
        )

    def run(self) -> None:
        """Train to the last step.

        Raises:
            Interrupted: a signal came; a checkpoint was written.
            ValueError: the loss is not finite.
            OSError: a checkpoint could not be written.
        """
        plan = self.plan(self.progress.epoch)
        bar = self.reporter.bar("training", self.total, "steps", self.progress.step)
        with StopRequest() as stop, bar:
            if self._evaluates():  # it was stopped in the middle of that
                self._evaluate(stop)
                self.save()
            while self.progress.step < self.total:
                if self.progress.batch == len(plan):
                    self.progress.epoch, self.progress.batch = self.progress.epoch + 1, 0
                    plan = self.plan(self.progress.epoch)
                ahead = plan[self.progress.batch : self.progress.batch + 1 + self.config.data.ahead]
                self.stepper.expect(ahead)
                self.optimizer_step(ahead[0], stop)
                self.progress.step += 1
                self.progress.batch += 1
                self._after_step(stop, bar)
            self.save()

    def optimizer_step(self, indices: list[int], stop: StopRequest) -> None:
        """One step on these conversations, shared between processes and micro-batches."""
        share = self.stepper.share(indices)
        total, *signals = self.ranks.add([sum(share.counts), *(float(stop.number == n) for n in StopRequest.NUMBERS)])
        self._stop_if(signals)
        step = self.progress.step
        # acceptance costs passes over the vocabulary: it is measured on the steps that are logged
        lr = learning_rate(step, self.total, self.config.train)
        self.stepper.run(share, total, step + 1, lr, self._logs(step + 1))
        self.tokens += int(self.lengths[indices].sum())

    def save(self) -> Path:
        """A checkpoint of where the run is; see :meth:`train.checkpoint.Checkpoints.save`."""
        self.progress.log_bytes = self.log.bytes
        return self.checkpoints.save(self.progress)

    def _stop_if(self, signals: list[float]) -> None:
        for number, seen in zip(StopRequest.NUMBERS, signals, strict=True):
            if seen:
                raise Interrupted(number, self.progress.step, self.save())

    def _after_step(self, stop: StopRequest, bar: Bar) -> None:
        step, every = self.progress.step, self.config.train.save_every
        if self._logs(step):
            self._log(bar)
        else:
            bar.update(step, self._rate())
        evaluates = self._evaluates()
        if evaluates:
            self._evaluate(stop)
        if evaluates or step == self.total or (every and step % every == 0):
            self.save()

    def _evaluates(self) -> bool:
        """Whether an evaluation is due and was not made."""
        step, every, last = self.progress.step, self.config.eval.every, self.progress.evaluation
        due = step == self.total or (every and step and step % every == 0)
        return bool(self.heldout is not None and due and (last is None or last["step"] != step))

    def _logs(self, step: int) -> bool:
        return step == self.total or step % self.config.train.log_every == 0

    def _rate(self) -> str:
        return f"{self.tokens / max(1e-9, time.monotonic() - self.since):,.0f} tokens/s"

    def _log(self, bar: Bar) -> None:
        figures = self.stepper.sums.figures(self.ranks)
        step, rate = self.progress.step, self._rate()
        lr = learning_rate(step - 1, self.total, self.config.train)
        per_second = self.tokens / max(1e-9, time.monotonic() - self.since)
        self.tokens, self.since = 0, time.monotonic()
        bar.update(step, rate)
        bar.quiet()
        self.reporter.say(
            f"step {step}/{self.total}  {_line(figures)}  lr {lr:.2e}  {rate}  {duration(bar.left(step))} left"
        )
        self.progress.figures = figures.flat("train")
        norm = {} if self.stepper.grad_norm is None else {"train/grad_norm": self.stepper.grad_norm}
        peak = max(self.ranks.collect(peak_bytes(self.accelerator.device))) / 2**30
        self._record(
            self.progress.figures
            | {"train/lr": lr, **norm, "train/tokens_per_second": per_second, "train/peak_memory_gib": peak}
        )

    def _evaluate(self, stop: StopRequest) -> None:
        assert self.heldout is not None
        cuda = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        where, lower = f"in the evaluation at step {self.progress.step}", "lower train.micro_tokens or eval.tokens"
        # what training draws does not hang on evaluations
        with memory_advice(where, lower), torch.random.fork_rng(cuda):
            try:
                result = evaluate(self.config, self.engine, self.heldout, self.stepper.batch, stop)
            except Exception:
                if self.ranks.count == 1:  # what was trained is not lost by it; others might not come to save with us
                    self.save()
                raise
        self._stop_if(self.ranks.add([float(stop.number == n) for n in StopRequest.NUMBERS]))
        self.since = time.monotonic()  # the rate is of training alone
        step = self.progress.step
        self.progress.evaluation = {"step": step, **result.to_dict()}
        for line in result.lines():
            self.reporter.say(f"step {step}/{self.total}  {line}")
        self._record(result.flat())
        score = result.score
        if score > self.progress.best:
            self.progress.best, self.progress.best_step = score, step

    def _record(self, values: dict[str, float]) -> None:
        """To the tracker and to log.jsonl."""
        self.accelerator.log(values, step=self.progress.step)
        if self.ranks.main:
            self.log.append(self.progress.step, values)


def plan_of(settings: TrainConfig, lengths: np.ndarray, epoch: int) -> list[list[int]]:
    """Conversations of each optimizer step of an epoch."""
    return plan_epoch(lengths, settings.batch_tokens, settings.bucket, settings.seed, epoch)


def total_steps(settings: TrainConfig, lengths: np.ndarray) -> int:
    """Optimizer steps of a run."""
    return settings.max_steps or sum(len(plan_of(settings, lengths, epoch)) for epoch in range(settings.epochs))


def continued_settings(config: RunConfig) -> dict[str, Any]:
    """``section.key`` → value of all that must be equal for a run to be continued."""
    return {name: value for name, value in _flat(config).items() if name not in FREE_TO_CHANGE}


def other_settings(config: RunConfig) -> dict[str, Any]:
    """``section.key`` → value of what a run may be continued with otherwise, though it touches how it goes on."""
    return {name: value for name, value in _flat(config).items() if name in FREE_TO_CHANGE}


def _flat(config: RunConfig) -> dict[str, Any]:
    return {
        f"{section}.{key}": value
        for section, values in to_dict(config).items()
        if section in ("data", "target", "heads", "train")
        for key, value in values.items()
    }


def _line(figures: Figures) -> str:
    terms = "  ".join(
        f"{name} {' '.join(f'{value:.3f}' for value in values)}" for name, values in figures.terms.items()
    )
    accepted = " ".join(f"{value:.3f}" for value in figures.acceptance)
    return f"loss {figures.loss:.4f}  {terms}  accepted {accepted}"
