"""Our trainings' states, made before the training so that the time they take is known whoever makes them first."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator

from train.assemble import load_conversations, make_heads
from train.cache import open_or_build
from train.cache_spec import CacheSpec
from train.cache_wider import wider
from train.config import RunConfig
from train.peers.inside.job import write_json
from train.progress import Reporter
from train.ranks import Ranks
from train.targets import load_target


def prepared(config: RunConfig, accelerator: Accelerator, reporter: Reporter) -> tuple[np.ndarray, float | None]:
    """Lengths of the training conversations, and the seconds that their states took, now or before; None where some
    were there already, made by something else.

    Args:
        config: with ``data.cache_folder`` set; the conversations are prepared into the run's folder.
    """
    silent, ranks = Reporter(False), Ranks()
    target = load_target(config, accelerator)
    texts = load_conversations(config, "train", target, ranks, silent)
    if config.data.features != "cached":
        return texts.lengths, 0.0
    root = Path(str(config.data.cache_folder))
    root.mkdir(parents=True, exist_ok=True)
    # taps do not hang on the draft vocabulary, for which all answers would be counted
    whole = replace(config.heads, draft_vocab_size=None, draft_vocab_coverage=None)
    taps = tuple(make_heads(replace(config, heads=whole), target, texts, silent).config.taps)
    spec = CacheSpec(target, texts, taps, getattr(torch, config.data.feature_dtype), config.train.kernels)
    if (more := wider(spec, root)) is not None:
        spec = replace(spec, taps=more)  # read from those, so these cost what those did
    kept = root / f"{spec.folder(root).name}.json"
    if not (kept.is_file() and spec.folder(root).is_dir()):
        reporter.say(f"states of {texts.lengths.sum():,} tokens at taps {list(spec.taps)}: {spec.folder(root)}")
        there = spec.folder(root).is_dir()
        if there:
            reporter.say("some or all are there from before: what they took is not known")
        began = time.perf_counter()
        open_or_build(spec, root, ranks)
        write_json(kept, {"seconds": None if there else time.perf_counter() - began})
    seconds = json.loads(kept.read_text(encoding="utf-8"))["seconds"]
    return texts.lengths, None if seconds is None else float(seconds)
