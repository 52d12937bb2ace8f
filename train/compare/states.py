"""Our trainings' states, made before the training so that the time they take is known whoever makes them first."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator

from train.assemble import load_conversations, load_target, make_heads
from train.cache import CacheSpec, open_or_build
from train.config import RunConfig
from train.peers.inside.job import write_json
from train.progress import Reporter
from train.ranks import Ranks


def prepared(config: RunConfig, accelerator: Accelerator, reporter: Reporter) -> tuple[np.ndarray, float]:
    """Lengths of the training conversations, and the seconds that their states took, now or before.

    Args:
        config: with ``data.cache_folder`` set; the conversations are prepared into the run's folder.
    """
    silent, ranks = Reporter(False), Ranks()
    target = load_target(config, accelerator)
    texts = load_conversations(config, "train", target, ranks, silent)
    if config.data.features == "online":
        return texts.lengths, 0.0
    root = Path(str(config.data.cache_folder))
    root.mkdir(parents=True, exist_ok=True)
    quick = make_heads(replace(config, heads=replace(config.heads, draft_vocab_size=None)), target, texts, silent)
    spec = CacheSpec(target, texts, tuple(quick.config.taps), getattr(torch, config.data.feature_dtype))
    kept = root / f"{spec.folder(root).name}.json"
    if not (kept.is_file() and spec.folder(root).is_dir()):
        reporter.say(f"states of {texts.lengths.sum():,} tokens at taps {list(spec.taps)}: {spec.folder(root)}")
        began = time.perf_counter()
        open_or_build(spec, root, ranks)
        write_json(kept, {"seconds": time.perf_counter() - began})
    return texts.lengths, float(json.loads(kept.read_text(encoding="utf-8"))["seconds"])
