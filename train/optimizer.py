"""The optimizer of the heads' weights: AdamW for all of them, or Muon for the matrices that states go through.

Muon moves a matrix along its momentum with all singular values made alike (arXiv 2502.16982, whose scale lets it take
AdamW's learning rate), which needs the matrix whole: FSDP2 puts it together, DeepSpeed's ZeRO flattens it; with
``row_beta`` its rows are evened (``train/row_muon.py``). Matrices over a vocabulary, norms and biases stay AdamW's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from heads.base import DraftHeads
from train.config import TrainConfig
from train.row_muon import RowMuon
from train.settings import SettingsError

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

ADAMW, MUON = "adamw", "muon"
FACTOR = "factor"  # of a group: its learning rate in the run's
# values of a weight's size that an optimizer keeps
MOMENTS: dict[str, tuple[str, ...]] = {ADAMW: ("exp_avg", "exp_avg_sq"), MUON: ("momentum_buffer",)}


def parted(settings: TrainConfig, heads: DraftHeads, weights: Iterable[nn.Parameter]) -> dict[str, list[nn.Parameter]]:
    """The weights by which of the two moves them, in the order in which an optimizer has them."""
    if settings.optimizer == ADAMW:
        return {ADAMW: list(weights)}
    matrices = {
        id(module.weight)
        for name, module in heads.named_modules()
        if isinstance(module, nn.Linear)
        and name.partition(".")[0] not in heads.over_vocabulary
        and min(module.weight.shape) > 1
    }
    found: dict[str, list[nn.Parameter]] = {MUON: [], ADAMW: []}
    for weight in weights:
        found[MUON if id(weight) in matrices else ADAMW].append(weight)
    return {name: part for name, part in found.items() if part}


def make_optimizer(settings: TrainConfig, heads: DraftHeads) -> Make:
    """What makes the optimizer of the heads' trained weights."""

    def make(weights: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        parts = [PARTS[name](part, settings) for name, part in parted(settings, heads, weights).items()]
        return parts[0] if len(parts) == 1 else Several(parts)

    return make


def refuse_parts(settings: TrainConfig, engine: str) -> None:
    """An optimizer that needs whole matrices, under an engine that has none.

    Raises:
        SettingsError: always where it was asked for.
    """
    if settings.optimizer == MUON:
        raise SettingsError(
            f"train.optimizer muon needs whole matrices, and {engine} flattens them: set train.optimizer to adamw, "
            "or launch data parallel or under FSDP2"
        )


class Several(torch.optim.Optimizer):
    """Optimizers of different weights as one: their groups one after another, and one state.

    Args:
        parts: of one group each.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = list(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move all weights.

        Raises:
            ValueError: there is a closure; each part would run it again.
        """
        if closure is not None:
            raise ValueError("a step of several optimizers takes no closure")
        for part in self.parts:
            part.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; the parts go on from what was loaded."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        for part, group in zip(self.parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state


def _adamw(weights: list[nn.Parameter], settings: TrainConfig) -> torch.optim.Optimizer:
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW(weights, lr=settings.lr, betas=betas, weight_decay=settings.weight_decay)


def _muon(weights: list[nn.Parameter], settings: TrainConfig) -> torch.optim.Optimizer:
    groups = [{"params": weights, FACTOR: settings.muon_factor}]
    common: dict[str, Any] = {
        "lr": settings.lr * settings.muon_factor,
        "momentum": settings.momentum,
        "weight_decay": settings.weight_decay,
        "adjust_lr_fn": "match_rms_adamw",
    }
    return RowMuon(groups, settings.row_beta, **common) if settings.row_beta else torch.optim.Muon(groups, **common)


PARTS: dict[str, Callable[[list[nn.Parameter], TrainConfig], torch.optim.Optimizer]] = {MUON: _muon, ADAMW: _adamw}
