"""Training on from heads that there are (``heads.init``), wholly or by low-rank factors (``heads.lora``)."""

from __future__ import annotations

from pathlib import Path

import torch

from heads.base import DraftHeads
from heads.layer import counted
from heads.target import Target
from heads.tuned import adapt, start_from
from train.config import RunConfig
from train.engine_state import HEADS
from train.settings import SettingsError


def existing_heads(config: RunConfig, target: Target, dtype: torch.dtype) -> DraftHeads:
    """The heads of ``heads.init``, with factors on them where ``heads.lora`` says so.

    Raises:
        SettingsError: the recipe asks for other heads than those are, or the run would write over them.
        TargetMismatch: they are another target's, and ``heads.allow_mismatch`` is false.
    """
    section, output = config.heads, Path(config.output.folder)
    assert section.init is not None
    if Path(section.init).resolve() in (output.resolve(), (output / HEADS).resolve()):
        raise SettingsError(
            f"heads.init is {section.init}, which this run would write over: set output.folder to a new folder"
        )
    heads = start_from(section.init, target, dtype, allow_mismatch=section.allow_mismatch)
    there = heads.config
    asked = {"kind": section.kind, "lookahead": section.lookahead, "taps": section.taps}
    asked |= {"draft_vocab_size": section.draft_vocab_size}
    wrong = [
        f"heads.{name} is {value}, but they have {getattr(there, name)}"
        for name, value in asked.items()
        if value is not None and value != getattr(there, name)
    ]
    wrong += [
        f"heads.options.{name} is {value!r}, but they have {there.options.get(name)!r}"
        for name, value in section.options.items()
        if name not in heads.starting and counted(there.options | {name: value})[name] != there.options.get(name)
    ]
    if section.draft_vocab_coverage is not None:
        wrong.append("heads.draft_vocab_coverage would choose a draft vocabulary, but theirs is part of their weights")
    if wrong:
        raise SettingsError(f"heads.init {section.init}: {'; '.join(wrong)}")
    if section.lora:
        adapt(heads, section.lora)
    return heads
