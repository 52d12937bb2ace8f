"""Our own trainer as the others are measured: a fresh process that is handed a job in files and writes its result."""

from __future__ import annotations

import sys
from pathlib import Path

import datasets  # type: ignore[import-untyped]
import torch

from train.assemble import make_heads
from train.cache import open_or_build
from train.cache_spec import CacheSpec
from train.conversations import Conversations
from train.features import FeatureSource, OnlineFeatures
from train.interrupt import StopRequest
from train.launch import start
from train.loop import Trainer
from train.peers.handover import RECIPE
from train.peers.inside.job import Job, Texts, Watch
from train.progress import Reporter
from train.ranks import Ranks
from train.settings import load
from train.targets import load_target


def conversations(texts: Texts) -> Conversations:
    """What was handed over, as our trainer reads it."""
    rows = range(len(texts))
    columns = {
        "input_ids": [texts.ids(i).tolist() for i in rows],
        "loss_mask": [texts.loss_mask(i).tolist() for i in rows],
    }
    return Conversations(datasets.Dataset.from_dict(columns), "the hand-over")


def run(job: Job) -> None:
    """Train and write the result."""
    watch, silent = Watch(job), Reporter(False)
    config = load(Path(job.handover) / RECIPE, job.extra["settings"])
    accelerator = start(config)
    target = load_target(config, accelerator)
    texts = conversations(Texts(job.handover))
    heads = make_heads(config, target, texts, silent)
    dtype, taps = getattr(torch, config.data.feature_dtype), tuple(heads.config.taps)
    source: FeatureSource = OnlineFeatures(target, texts, taps, dtype)
    if config.data.features == "cached":
        source = open_or_build(CacheSpec(target, texts, taps, dtype), Path(job.states), Ranks(accelerator))
    trainer = Trainer(config, accelerator, heads, source, None, silent)
    watch.start()
    for step in job.steps:
        watch.given([(texts.ids(i), texts.loss_mask(i)) for i in step])
        trainer.optimizer_step(step, StopRequest())
        trainer.progress.step += 1
        watch.stepped()
    ids = heads.draft_ids
    watch.finish(
        heads,
        taps=heads.config.taps,
        lookahead=heads.config.lookahead,
        draft_ids=torch.arange(target.vocab_size) if ids is None else ids,
        checkpoint="",
        names="torch transformers",
    )


if __name__ == "__main__":
    run(Job.read(sys.argv[1]))
