"""Cached against online states of the target: tokens a second of the same training, measured in one go."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from train.assemble import load_conversations, make_heads
from train.cache import open_or_build
from train.cache_spec import CacheSpec
from train.config import RunConfig
from train.conversations import Conversations
from train.evaluation import spread
from train.features import FeatureSource, OnlineFeatures
from train.interrupt import StopRequest
from train.launch import start
from train.loop import Trainer
from train.progress import Reporter
from train.ranks import Ranks
from train.targets import load_target


@dataclass(frozen=True)
class Speed:
    """What was measured.

    Attributes:
        tokens: of one epoch.
        online, cached: seconds of each epoch.
        build: seconds to build the cache.
    """

    tokens: int
    online: list[float]
    cached: list[float]
    build: float

    def to_dict(self) -> dict[str, Any]:
        """Figures for JSON; ``ratio`` leaves the build out, ``ratio_with_build`` counts it in over all epochs."""
        online, cached = sum(self.online), sum(self.cached)
        tokens = self.tokens * len(self.online)
        return {
            "epochs": len(self.online),
            "tokens_per_epoch": self.tokens,
            "online_tokens_per_second": tokens / online,
            "cached_tokens_per_second": tokens / cached,
            "ratio": online / cached,
            "build_seconds": self.build,
            "online_seconds": online,
            "cached_seconds_with_build": cached + self.build,
            "ratio_with_build": online / (cached + self.build),
        }


def measure(config: RunConfig, conversations: int, epochs: int, reporter: Reporter) -> Speed:
    """Train twice from the same start on some of the recipe's conversations, epochs in turn so that both meet the
    machine in the same mood; the cache is built anew in a folder that is removed afterwards.

    Raises:
        ValueError, OSError: as training does.
    """
    with aside(config) as quiet:
        return _measure(quiet, conversations, epochs, reporter, Path(quiet.output.folder))


@contextmanager
def aside(config: RunConfig) -> Iterator[RunConfig]:
    """The recipe without a tracker, its run in a folder that is removed afterwards, on the disk that caches are on."""
    if config.data.cache_folder:
        Path(config.data.cache_folder).mkdir(parents=True, exist_ok=True)
    scratch = tempfile.mkdtemp(prefix="headstart-speed-", dir=config.data.cache_folder)
    try:
        yield replace(
            config, tracker=replace(config.tracker, kind="none"), output=replace(config.output, folder=scratch)
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def time_epoch(trainer: Trainer, epoch: int) -> float:
    """Seconds of an epoch's steps."""
    began = time.perf_counter()
    for indices in trainer.plan(epoch):
        trainer.optimizer_step(indices, StopRequest())
        trainer.progress.step += 1
    return time.perf_counter() - began


def _measure(config: RunConfig, conversations: int, epochs: int, reporter: Reporter, scratch: Path) -> Speed:
    accelerator = start(config)
    ranks, silent = Ranks(accelerator), Reporter(False)
    target = load_target(config, accelerator)
    every = load_conversations(config, "train", target, ranks, silent)
    some: Conversations = every.select(spread(len(every), conversations))
    heads = [make_heads(config, target, some, silent) for _ in range(2)]
    dtype = getattr(torch, config.data.feature_dtype)
    spec = CacheSpec(target, some, tuple(heads[0].config.taps), dtype)
    began = time.perf_counter()
    sources: list[FeatureSource] = [open_or_build(spec, scratch, ranks)]
    built = time.perf_counter() - began
    sources.append(OnlineFeatures(target, some, spec.taps, dtype))
    trainers = [Trainer(config, accelerator, h, s, None, silent) for h, s in zip(heads, sources, strict=True)]
    seconds: list[list[float]] = [[], []]
    for epoch in range(epochs):
        for trainer, times in zip(trainers, seconds, strict=True):
            times.append(time_epoch(trainer, epoch))
        reporter.say(f"epoch {epoch + 1}/{epochs}: cached {seconds[0][-1]:.1f} s, online {seconds[1][-1]:.1f} s")
    return Speed(int(some.lengths.sum()), online=seconds[1], cached=seconds[0], build=built)
