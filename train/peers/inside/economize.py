"""Trains EAGLE-3 with the package ``economize`` by its own loop ``fit``: the target runs at every step.

It is given our steps as ready batches of conversations of like length, so that it pads as little as we do; its own
shuffling would pad more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import economize
import torch
from economize.techniques.eagle3 import Eagle3Config
from economize.train import OBJECTIVES, LoaderSource, fit
from economize.train.data import Example, collate
from transformers import AutoModelForCausalLM

from .job import Job, Shape, Texts, Watch

AUTOCAST = {"bf16": "bfloat16", "no": None}


class Steps:
    """The steps' batches, made when asked for; economize marks the position before a trained token."""

    def __init__(self, job: Job, texts: Texts, watch: Watch) -> None:
        self.job, self.texts, self.watch = job, texts, watch

    def __iter__(self) -> Iterator[Any]:
        for step in self.job.steps:
            pairs = [(self.texts.ids(i), self.texts.loss_mask(i)) for i in step]
            self.watch.given(pairs)
            yield collate([Example(ids, torch.cat([mask[1:], mask.new_zeros(1)]).long()) for ids, mask in pairs])


def settings(shape: Shape) -> Any:
    """economize's form of the shape.

    Raises:
        ValueError: EAGLE-3.1's norms, which economize lacks.
    """
    if shape.fc_norm or shape.norm_output:
        raise ValueError("economize has neither fc_norm nor norm_output: set both options of the heads to false")
    return Eagle3Config(
        aux_layers=tuple(shape.taps),
        head="own",
        draft_vocab=shape.draft_vocab_size if shape.draft_vocab_size < shape.vocab_size else None,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_attention_heads,
        num_kv_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        rope_theta=shape.rope_theta,
        rms_norm_eps=shape.rms_norm_eps,
        train_steps=shape.lookahead,
    )


def learned(record: dict[str, Any]) -> dict[str, Any]:
    """Loss and accuracy by depth of a line of its log."""
    accuracy = [record[f"acc{depth}"] for depth in range(1, len(record)) if f"acc{depth}" in record]
    return {"loss": record["loss"], "accuracy": accuracy}


def run(job: Job) -> None:
    """Train and write the result."""
    shape, texts, watch = job.shape(), Texts(job.handover), Watch(job)
    target: Any = AutoModelForCausalLM.from_pretrained(shape.target, dtype=getattr(torch, shape.target_dtype))
    model = economize.apply(target.to("cuda" if torch.cuda.is_available() else "cpu"), settings(shape))
    technique = model.techniques["eagle3"]
    if shape.draft_vocab_size < shape.vocab_size:
        technique.set_draft_vocab(texts.draft_ids)
    objective = OBJECTIVES.get("eagle3_ttt")(steps=shape.lookahead, step_decay=shape.position_decay)
    wanted = job.optimizer
    watch.start()
    fit(
        model,
        LoaderSource(Steps(job, texts, watch)),
        objective,
        steps=len(job.steps),
        lr=wanted["lr"],
        betas=(wanted["beta1"], wanted["beta2"]),
        weight_decay=wanted["weight_decay"],
        warmup_steps=wanted["warmup_steps"],
        schedule=wanted["schedule"],
        min_lr_ratio=wanted["final_lr"],
        grad_clip=wanted["clip"],
        autocast=AUTOCAST[job.precision],
        log_every=1,
        output_dir=Path(job.out) / "run" if job.keep else None,
        callbacks=[lambda record: watch.stepped(**learned(record))],
    )
    watch.finish(
        technique,
        taps=technique.aux_layers,
        lookahead=objective.steps,
        draft_ids=technique.draft_ids,
        checkpoint="run/final" if job.keep else "",
        names="economize torch transformers",
    )


if __name__ == "__main__":
    run(Job.read(sys.argv[1]))
