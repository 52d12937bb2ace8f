"""What storing taps in eight bits does to training: the loss moves by less than the bound, and heads learn as much.

Three bits of mantissa are off by up to 1/16; in a loss, which is a mean over rows, that mostly cancels.
Heads are taught the texts they are judged on first: of heads that do not use their states no rounding would show.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import heads as package
from heads.base import DraftHeads
from heads.kinds import KINDS
from heads.target import Target
from tests.heads.small import ON_LAST_STATE, number
from tests.train.conftest import Launch
from tests.train.world import conversations, losses, tiny_target
from train.features import OnlineFeatures
from train.losses import make_criterion
from train.storage import FP8, Storage

BOUND = {torch.bfloat16: 1e-4, FP8: 5e-3}  # of the loss
LENGTHS = [40, 25, 33, 18, 40, 29]


@lru_cache(maxsize=1)
def target() -> Target:
    return tiny_target()


def loss_on(heads: DraftHeads, dtype: torch.dtype) -> Tensor:
    """Mean loss over the texts, whose taps are stored so."""
    torch.manual_seed(0)  # of the anchors that some kinds draw
    source = OnlineFeatures(target(), conversations(LENGTHS), heads.config.taps, dtype)
    batch = source.batch(range(len(LENGTHS)))
    report = heads.loss(batch, make_criterion({"soft_ce": 1.0}), measure=False)
    return report.total / report.count


@lru_cache(maxsize=len(KINDS))
def taught(kind: str) -> DraftHeads:
    """Heads that have learned on exact states."""
    torch.manual_seed(0)
    config = package.make_config(kind, target(), lookahead=3, taps=None if kind in ON_LAST_STATE else (1, 2, 3))
    made = package.build(config, target()).double()
    made.initialize()
    optimizer = torch.optim.Adam(made.parameters(), lr=1e-2)
    for _ in range(50):
        loss_on(made, torch.float64).backward()
        optimizer.step()
        optimizer.zero_grad()
    return made.eval()


def off(kind: str, dtype: torch.dtype) -> float:
    """By what share of it the loss is off that on exact states."""
    exact = number(loss_on(taught(kind), torch.float64))
    return abs(number(loss_on(taught(kind), dtype)) - exact) / exact


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_moves_little(kind: str) -> None:
    for dtype, bound in BOUND.items():
        assert 0 < off(kind, dtype) < bound, dtype


right = Storage.encode


def without_scales(self: Storage, taps: Tensor, hidden: Tensor) -> dict[str, Tensor]:
    """One scale for all: small values are lost."""
    scales = torch.full((*taps.shape[:-1], self.taps), 448.0)
    return {"taps": (taps / 448).to(FP8), "scales": scales, "hidden": hidden.to(self.value_dtype)}


def scales_of_the_next(self: Storage, taps: Tensor, hidden: Tensor) -> dict[str, Tensor]:
    """Each tap read at another one's scale."""
    columns = right(self, taps, hidden)
    return columns | {"scales": columns["scales"].roll(1, -1)}


@pytest.mark.parametrize(("mistake", "kind"), [(without_scales, "medusa"), (scales_of_the_next, "eagle")])
def test_a_mistake_in_the_scales_moves_it_more(
    mistake: Callable[[Storage, Tensor, Tensor], dict[str, Tensor]], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taught(kind)
    monkeypatch.setattr(
        Storage, "encode", lambda self, *states: (mistake if self.dtype == FP8 else right)(self, *states)
    )
    assert off(kind, FP8) > 4 * BOUND[FP8]


def test_heads_learn_as_much(world: Path, launch: Launch) -> None:
    """The same run on bf16 and on eight bits: each logged loss within the bound, and what was learned far beyond it."""
    settings = ("--train.max_steps", 16, "--train.lr", "1e-2", "--eval.prompts", 0)
    found = {}
    for dtype in ("bfloat16", "float8_e4m3fn"):
        report = launch("--data.feature_dtype", dtype, *settings, "--output.folder", world / dtype)
        found[dtype] = (list(losses(world / dtype).values()), report["heldout"]["heldout/loss"])
    (half, half_unseen), (eight, eight_unseen) = found["bfloat16"], found["float8_e4m3fn"]
    assert half != eight
    assert eight == pytest.approx(half, rel=BOUND[FP8])
    assert eight_unseen == pytest.approx(half_unseen, rel=BOUND[FP8])
    assert half[0] - half[-1] > 20 * BOUND[FP8] * half[0]
