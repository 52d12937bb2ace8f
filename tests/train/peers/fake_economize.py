"""As much of the package economize 0.3.2 as our runner calls, to see what it is given; it learns nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

calls: dict[str, Any] = {}


@dataclass
class Eagle3Config:
    """The settings that are passed; a setting that the real one lacks is an error here, too."""

    aux_layers: tuple[int, ...]
    head: str
    draft_vocab: int | None
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    train_steps: int


class Technique(nn.Module):
    """Weights of the real names and shapes."""

    def __init__(self, config: Eagle3Config, width: int, vocab: int) -> None:
        super().__init__()
        c, taps = config, len(config.aux_layers)
        self.config, self.aux_layers, self.vocab = config, config.aux_layers, vocab
        self.fc, self.norm = nn.Linear(taps * width, width, bias=False), nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, c.draft_vocab or vocab, bias=False)
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        attention = {"q_proj": (q, 2 * width), "k_proj": (kv, 2 * width), "v_proj": (kv, 2 * width)}
        inner = c.intermediate_size
        mlp = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
        self.layer = nn.Module()
        self.layer.self_attn, self.layer.mlp = nn.Module(), nn.Module()
        for part, shapes in ((self.layer.self_attn, attention | {"o_proj": (width, q)}), (self.layer.mlp, mlp)):
            for name, (rows, columns) in shapes.items():
                setattr(part, name, nn.Linear(columns, rows, bias=False))
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(self.layer, name, nn.RMSNorm(width))
        self.draft_ids = torch.arange(c.draft_vocab or vocab)

    def set_draft_vocab(self, ids: Tensor) -> None:
        self.draft_ids = ids


@dataclass
class Model:
    techniques: dict[str, Technique]


def apply(model: Any, config: Eagle3Config) -> Model:
    calls["target"] = model
    return Model({"eagle3": Technique(config, model.config.hidden_size, model.config.vocab_size)})


__version__ = "0.3.2"


@dataclass
class DecodeConfig:
    cycle_length: int
    lossless: bool


@dataclass
class Decoded:
    tokens: Tensor
    acceptance: list[tuple[int, int]]


class Loaded:
    """Drafts what is always half right: two of its drafts are accepted in every round."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def decode(self, ids: Tensor, count: int, *, decoding: DecodeConfig, stop: list[int]) -> Decoded:
        calls.setdefault("decoded", []).append((ids.tolist(), count, decoding, stop))
        tokens = self.target.generate(ids[None], do_sample=False, max_new_tokens=count)[0, len(ids) :]
        rounds = -(-(len(tokens) - 1) // 3)
        return Decoded(tokens, [(decoding.cycle_length - 1, 2)] * rounds)


def load(target: Any, checkpoint: str) -> Loaded:
    calls["checkpoint"] = sorted(path.name for path in Path(checkpoint).iterdir())
    return Loaded(target)


@dataclass
class Example:
    input_ids: Tensor
    loss_mask: Tensor


@dataclass
class Batch:
    examples: list[Example]


def collate(examples: list[Example]) -> Batch:
    return Batch(examples)


@dataclass
class LoaderSource:
    loader: Iterable[Batch]


@dataclass
class Objective:
    steps: int
    step_decay: float
    registry: dict[str, Any] = field(default_factory=dict)


class OBJECTIVES:
    """The registry."""

    @staticmethod
    def get(name: str) -> Callable[..., Objective]:
        assert name == "eagle3_ttt"
        return Objective


def fit(
    model: Model, data: LoaderSource, objective: Objective, *, steps: int, output_dir: Path | None,
    callbacks: list[Callable[[dict[str, Any]], None]], **settings: Any,
) -> None:  # fmt: skip
    """Walk through the steps, call back behind each, and write what the real one writes."""
    calls.update(settings, objective=objective, batches=[])
    for number, batch in zip(range(steps), data.loader, strict=True):
        calls["batches"].append(batch.examples)
        depths = {f"acc{depth}": depth / 10 for depth in range(1, objective.steps + 1)}
        callbacks[0]({"step": number, "loss": 9.0 - number, "lr": 0.1, "kl1": 1.0, **depths, "time": 0.1})
    if output_dir is not None:
        save(model.techniques["eagle3"], output_dir / "final")


def save(technique: Technique, folder: Path) -> None:
    folder.mkdir(parents=True)
    state, ids = technique.state_dict(), technique.draft_ids
    state |= {"d2t": ids - torch.arange(len(ids)), "t2d": torch.zeros(technique.vocab, dtype=torch.bool)}
    state["t2d"][ids] = True
    save_file({f"eagle3.{name}": value for name, value in state.items()}, folder / "economize_model.safetensors")
    technique_config = {"technique": "eagle3", "config": asdict(technique.config)}
    config = {"economize_version": "0.3.2", "base_model": "x", "techniques": [technique_config]}
    (folder / "economize_config.json").write_text(json.dumps(config))
