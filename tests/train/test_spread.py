"""Weights that are not whole are put together or refused: nothing partial is ever saved as heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from heads import build, make_config
from heads.store import HeadsFileError
from tests.train.world import tiny_target
from train.engine import Engine
from train.losses import make_criterion
from train.spread import check_dtype, weights_hash
from train.step import HeadsStep, Step


def engine() -> Engine:
    heads = build(make_config("medusa", tiny_target(), lookahead=2), tiny_target())
    heads.initialize()
    inner = HeadsStep(heads.double(), make_criterion({"soft_ce": 1.0}), [1.0, 1.0], "no")
    return Engine(Accelerator(cpu=True), Step(inner), torch.optim.AdamW)


@pytest.mark.parametrize("left", [0, 5], ids=["nothing of it", "a part of it"])
def test_a_weight_that_is_not_whole_is_an_error_before_anything_is_written(left: int, tmp_path: Path) -> None:
    run = engine()
    heads: Any = run.heads
    weight = heads.blocks[0][0].linear.weight
    weight.data = weight.data.flatten()[:left]
    with pytest.raises(
        RuntimeError, match=rf"blocks\.0\.0\.linear\.weight is \({left},\) where \(32, 32\) is expected"
    ):
        run.whole_heads().save_pretrained(tmp_path / "heads")
    assert not (tmp_path / "heads").exists()


@pytest.mark.parametrize("left", [0, 5], ids=["nothing of it", "a part of it"])
def test_heads_refuse_to_save_what_is_not_whole(left: int, tmp_path: Path) -> None:
    heads: Any = engine().heads
    weight = heads.blocks[0][0].linear.weight
    weight.data = weight.data.flatten()[:left]
    with pytest.raises(HeadsFileError, match=r"blocks\.0\.0\.linear\.weight"):
        heads.save_pretrained(tmp_path / "heads")
    assert not (tmp_path / "heads" / "heads.safetensors").exists()


def test_a_copy_of_the_heads_draws_nothing_and_shares_nothing() -> None:
    run = engine()
    before = torch.get_rng_state()
    copy = run.whole_heads()
    assert torch.equal(torch.get_rng_state(), before)
    for name, value in run.heads.state_dict().items():
        assert torch.equal(copy.state_dict()[name], value)
        assert copy.state_dict()[name].data_ptr() != value.data_ptr()


def test_the_hash_is_the_targets_own() -> None:
    target = tiny_target()
    assert weights_hash(target, True) == target.weights_hash()
    assert weights_hash(target, False) == ""  # nothing to help with


def test_dtypes_that_deepspeed_cannot_shard_are_refused() -> None:
    check_dtype(torch.bfloat16)
    with pytest.raises(ValueError, match=r"cannot shard a target in float64: set target\.dtype"):
        check_dtype(torch.float64)
