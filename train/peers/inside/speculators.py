"""Trains EAGLE-3 with the package ``speculators`` by its own ``Trainer``, from states of the target on disk.

It is given our steps as batches that hold their conversations end to end without any padding; its own sampler packs
into sequences of one length and fills them up. Without an accelerator its trainer needs to be told that the processor
is the device.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import speculators.train.trainer as trainer
import torch
from hs_connectors import FileTransfer
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import ArrowDataset, CollateFn
from torch.utils.data import DataLoader, Sampler
from transformers import LlamaConfig

from .job import Job, Shape, Texts, Watch

DTYPES = {"bf16": torch.bfloat16, "no": torch.float32}


def use_the_processor() -> None:
    """Where there is no accelerator, let its trainer take the processor for one."""
    if torch.accelerator.is_available():
        return
    torch.accelerator.current_accelerator = lambda *args, **kwargs: torch.device("cpu")
    torch.accelerator.is_available = lambda: False  # it has no memory of its own to be asked about
    torch.accelerator.synchronize = lambda *args, **kwargs: None
    trainer.get_local_rank = lambda: "cpu"


def write_data(texts: Texts, folder: Path) -> None:
    """The conversations as the folder of a data set that its loader reads."""
    rows = range(len(texts))
    made = datasets.Dataset.from_dict(
        {
            "input_ids": [texts.ids(i).tolist() for i in rows],
            "loss_mask": [texts.loss_mask(i).tolist() for i in rows],
            "seq_len": [len(texts.ids(i)) for i in rows],
        }
    )
    made.with_format("torch").save_to_disk(str(folder))


class Steps(Sampler[list[int]]):
    """Our steps in order, as row numbers of the data set."""

    def __init__(self, steps: list[list[int]]) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)


class EndToEnd:
    """Its own collation, of as many tokens as there are; each conversation loses one when it is shifted."""

    def __init__(self, shape: Shape, dtype: torch.dtype, watch: Watch) -> None:
        self.shape, self.dtype, self.watch = shape, dtype, watch

    def __call__(self, rows: Sequence[Any]) -> Any:
        self.watch.given([(row["input_ids"], row["loss_mask"]) for row in rows])
        length = sum(len(row["input_ids"]) - 1 for row in rows)
        taps, width = len(self.shape.taps), self.shape.hidden_size
        return CollateFn(length, width, num_target_layers=taps, dtype=self.dtype, preprocess=shift_batch)(rows)


def draft_model(shape: Shape, draft_ids: torch.Tensor) -> Any:
    """Its EAGLE-3 of our shape, with the target's matrices in it."""
    layer = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=False,
    )
    member = torch.zeros(shape.vocab_size, dtype=torch.bool)
    member[draft_ids] = True
    return Eagle3DraftModel.from_training_args(
        layer,
        t2d=member,
        d2t=draft_ids - torch.arange(len(draft_ids)),
        verifier_name_or_path=shape.target,
        target_layer_ids=list(shape.taps),
        draft_vocab_size=len(draft_ids),
        draft_attn_impl="sdpa",
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=shape.fc_norm,
        norm_output=shape.norm_output,
        ttt_steps=shape.lookahead,
    )


class Log(logging.Handler):
    """What its trainer says of a step, until it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[str, Any] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the figures of training."""
        if isinstance(record.msg, dict) and "train" in record.msg:
            told = record.msg["train"]
            accuracy = [told[f"full_acc_{depth}"] for depth in range(len(told)) if f"full_acc_{depth}" in told]
            self.last = {"loss": told["loss"], "accuracy": accuracy}


def run(job: Job) -> None:
    """Train and write the result."""
    use_the_processor()
    shape, texts, watch, out = job.shape(), Texts(job.handover), Watch(job), Path(job.out)
    model, dtype = draft_model(shape, texts.draft_ids), DTYPES[job.precision]
    write_data(texts, out / "data")
    data = ArrowDataset(0, out / "data", FileTransfer(Path(job.states)), on_missing="raise", hidden_states_dtype=dtype)
    loader = DataLoader(data, batch_sampler=Steps(job.steps), collate_fn=EndToEnd(shape, dtype, watch))
    told = {"ttt_steps": shape.lookahead, "ttt_step_loss_decay": shape.position_decay}
    wanted = job.optimizer
    config = trainer.TrainerConfig(
        lr=wanted["lr"],
        num_epochs=1,
        save_path=str(out / "run"),
        train_call_kwargs=told | {"loss_config": resolve_loss_config("kl_div", "eager")},
        optimizer=job.extra.get("optimizer", "adamw"),
        muon_lr=wanted["lr"],
        weight_decay=wanted["weight_decay"],
        scheduler_type=wanted["schedule"] if wanted["schedule"] != "constant" else "none",
        scheduler_warmup_steps=wanted["warmup_steps"],
        scheduler_total_steps=len(job.steps),
        hidden_states_dtype=dtype,
    )
    log = Log()
    logger = logging.getLogger("speculators.metrics")
    logger.setLevel(logging.INFO)
    logger.addHandler(log)
    made = trainer.Trainer(model, config, loader)
    watch.start()
    made.train_epoch(0, step_callback=lambda: watch.stepped(**log.last))
    if job.keep:
        made.maybe_save_checkpoint(0)
    d2t = model.d2t
    watch.finish(
        model,
        taps=model.target_layer_ids,
        lookahead=made.config.train_call_kwargs["ttt_steps"],
        draft_ids=texts.draft_ids if d2t is None else d2t + torch.arange(len(d2t), device=d2t.device),
        checkpoint="run/0" if job.keep else "",
        names="speculators torch transformers",
    )


if __name__ == "__main__":
    run(Job.read(sys.argv[1]))
