"""As much of the package speculators 0.9.0 as our runner calls, to see what it is given; it learns nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import load_from_disk  # type: ignore[import-untyped]
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.train.peers.fake_economize import Eagle3Config, Technique

calls: dict[str, Any] = {}


@dataclass
class FileTransfer:
    folder: Path


class ArrowDataset:
    """Rows of the data set with the states of the file of the same number."""

    def __init__(
        self, max_len: int, datapath: Path, transfer: FileTransfer, on_missing: str, hidden_states_dtype: torch.dtype
    ) -> None:
        self.data, self.transfer = load_from_disk(str(datapath)), transfer
        assert on_missing == "raise" and set(self.data.column_names) == {"input_ids", "loss_mask", "seq_len"}

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row, held = self.data[index], load_file(self.transfer.folder / f"hs_{index}.safetensors")
        assert torch.equal(held["token_ids"], row["input_ids"]) and int(row["seq_len"]) == len(row["input_ids"])
        states = held["hidden_states"]
        return {"input_ids": row["input_ids"], "loss_mask": row["loss_mask"], "hidden_states": states}


def shift_batch(row: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value[1:] for name, value in row.items()}


@dataclass
class CollateFn:
    max_len: int
    hidden_size: int
    num_target_layers: int
    dtype: torch.dtype
    preprocess: Callable[[dict[str, Tensor]], dict[str, Tensor]]

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        shifted = [self.preprocess(row) for row in rows]
        found = {name: torch.cat([row[name] for row in shifted])[None] for name in shifted[0]}
        assert found["input_ids"].shape == (1, self.max_len), "neither padded nor cut"
        assert found["hidden_states"].shape[2:] == (self.num_target_layers + 1, self.hidden_size)
        return found


class Eagle3DraftModel(nn.Module):
    """The layer under ``layers.0``, beside matrices of the target."""

    @classmethod
    def from_training_args(cls, layer: Any, **given: Any) -> Eagle3DraftModel:
        calls.update(given, layer=layer)
        model = cls()
        config = Eagle3Config(
            tuple(given["target_layer_ids"]), "own", given["draft_vocab_size"], layer.intermediate_size,
            layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim, 1.0, 1.0, 1,
        )  # fmt: skip
        made = Technique(config, layer.hidden_size, layer.vocab_size)
        model.fc, model.norm, model.lm_head = made.fc, made.norm, made.lm_head.requires_grad_(False)
        model.layers = nn.ModuleList([made.layer])
        model.verifier_norm, model.verifier_lm_head = nn.RMSNorm(layer.hidden_size), nn.Linear(2, 2)
        model.d2t, model.target_layer_ids = given["d2t"], given["target_layer_ids"]
        return model


class TrainerConfig(NamedTuple):
    lr: float
    num_epochs: int
    save_path: str
    train_call_kwargs: dict[str, Any]
    optimizer: str
    muon_lr: float
    weight_decay: float
    scheduler_type: str
    scheduler_warmup_steps: int
    scheduler_total_steps: int
    hidden_states_dtype: torch.dtype


class Trainer:
    """Walks through the batches, logs and calls back behind each."""

    def __init__(self, model: Eagle3DraftModel, config: TrainerConfig, loader: Any) -> None:
        self.model, self.config, self.loader = model, config, loader

    def train_epoch(self, epoch: int, *, step_callback: Callable[[], None]) -> None:
        calls["batches"], calls["device"] = [], torch.accelerator.current_accelerator()
        for batch in self.loader:
            calls["batches"].append(batch)
            told = {"loss": 5.0, "full_acc_0": 0.5, "full_acc_1": 0.25, "cond_acc_0": 0.1}
            logging.getLogger("speculators.metrics").info({"train": told, "epoch": epoch})
            step_callback()


def resolve_loss_config(name: str, implementation: str) -> tuple[str, str]:
    return name, implementation
