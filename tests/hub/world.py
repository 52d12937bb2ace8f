"""A target that can be saved and loaded anywhere, with a byte tokenizer, and heads for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import heads
from heads.base import DraftHeads
from heads.target import Target
from tests.data.toys import tokenizer
from tests.tiny import tiny_model

PROMPT = "hello there"


def text_model(**changes: Any) -> Any:
    """A tiny Llama in float32 whose vocabulary is the byte tokenizer's."""
    return tiny_model("llama", dtype=torch.float32, vocab=264, **changes)


def save_target(folder: Path, **changes: Any) -> Path:
    """A target's folder, as people have them."""
    text_model(**changes).save_pretrained(folder)
    tokenizer(None).save_pretrained(folder)
    return folder


def heads_on(target: Target, kind: str = "eagle", seed: int = 0, **settings: Any) -> DraftHeads:
    """Heads that draft now and then what the target says."""
    settings = {"taps": (1, 2, 3)} | settings if kind == "eagle" else settings
    built = heads.build(heads.make_config(kind, target, lookahead=2, **settings), target).to(target.dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        built.initialize()
    return built.eval()


def plain_text(target: Target, new: int = 16) -> list[int]:
    """What the target itself says behind ``PROMPT``, greedily."""
    ids = torch.tensor([target.tokenizer()(PROMPT)["input_ids"]])
    return target.model.generate(ids, max_new_tokens=new, do_sample=False)[0].tolist()
