"""States of the target: cached and online are the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import train.cache_build as building
from heads.target import Target
from tests.train.world import conversations, tiny_target
from train.batches import by_length
from train.cache import open_or_build
from train.cache_spec import CacheSpec
from train.features import OnlineFeatures
from train.ranks import Ranks

LENGTHS = [9, 5, 17, 12, 5, 30]
TAPS = (1, 2, 4)


def spec(target: Target, dtype: torch.dtype) -> CacheSpec:
    return CacheSpec(target, conversations(LENGTHS), TAPS, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_cached_is_online(tmp_path: Path, dtype: torch.dtype) -> None:
    target = tiny_target()
    made = spec(target, dtype)
    cached = open_or_build(made, tmp_path, Ranks())
    online = OnlineFeatures(target, made.conversations, TAPS, dtype)
    for indices in ([0], [5, 1], [2, 3, 4]):
        ours, theirs = cached.batch(indices), online.batch(indices)
        assert ours.documents is theirs.documents is None
        for name, value in vars(ours).items():
            other = getattr(theirs, name)
            if value is None:
                continue
            assert value.dtype == other.dtype
            if name in ("taps", "hidden", "lse"):  # the pass of another shape may round a float64 sum differently
                limits = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float8_e4m3fn: 0.13}
                kept = {"lse": torch.float32, "hidden": made.storage.value_dtype}
                limit = limits[kept.get(name, dtype)]
                torch.testing.assert_close(value.double(), other.double(), rtol=limit, atol=limit)
            else:
                assert torch.equal(value, other), name


def test_passes_of_the_same_shape_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One conversation a pass in the cache, one a batch online: float32 states to the last bit."""
    monkeypatch.setattr(building, "BUILD_TOKENS", 1)
    target = tiny_target(torch.float32)
    made = spec(target, torch.float32)
    cached = open_or_build(made, tmp_path, Ranks())
    online = OnlineFeatures(target, made.conversations, TAPS, torch.float32)
    for index in range(len(LENGTHS)):
        ours, theirs = cached.batch([index]), online.batch([index])
        there = {name: value for name, value in vars(ours).items() if value is not None}
        assert all(torch.equal(value, getattr(theirs, name)) for name, value in there.items())


def test_states_are_the_ones_the_target_reads() -> None:
    """The output matrix on the last state gives the target's own arg-max; taps are transformers' hidden states."""
    target = tiny_target()
    made = conversations([20], prompt=1)
    batch = OnlineFeatures(target, made, TAPS, torch.float64).batch([0])
    out = target.model(batch.ids, output_hidden_states=True)
    assert torch.equal(target.project(batch.hidden).argmax(-1), out.logits.argmax(-1))
    seen: list[Any] = []  # what the last layer gives is not that state: the final norm is still to come
    hook = target.layers[-1].register_forward_hook(lambda _, __, given: seen.append(given))
    target.model(batch.ids)
    hook.remove()
    before = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    assert (target.project(before).argmax(-1) == out.logits.argmax(-1)).sum() < 20 == batch.ids.numel()
    assert torch.equal(batch.taps, torch.cat([out.hidden_states[i] for i in TAPS], -1))
    assert torch.equal(batch.top[:, :-1], out.logits.argmax(-1)[:, :-1])
    torch.testing.assert_close(batch.lse[:, :-1].double(), out.logits.logsumexp(-1)[:, :-1], rtol=1e-6, atol=1e-6)
    assert batch.hidden.requires_grad is False
    (batch.taps * torch.ones(1, dtype=torch.float64, requires_grad=True)).sum().backward()  # autograd may save them


def test_padding_is_zero_and_masked() -> None:
    made = conversations([4, 9])
    batch = OnlineFeatures(tiny_target(), made, TAPS, torch.float64).batch([0, 1])
    assert batch.mask.sum(1).tolist() == [4, 9]
    assert not batch.taps[0, 4:].any() and not batch.hidden[0, 4:].any() and not batch.loss_mask[0, 4:].any()


def test_equal_keys_share_a_cache_and_others_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    made = spec(target, torch.float32)
    open_or_build(made, tmp_path, Ranks())
    monkeypatch.setattr(building, "run_target", lambda *_: pytest.fail("computed again"))
    open_or_build(spec(target, torch.float32), tmp_path, Ranks())
    others = [
        spec(target, torch.float64),
        CacheSpec(target, made.conversations, (1, 2), torch.float32),
        CacheSpec(target, conversations([9, 5]), TAPS, torch.float32),
        CacheSpec(target, conversations(LENGTHS, prompt=4), TAPS, torch.float32),
        spec(tiny_target(torch.float32), torch.float32),
    ]
    folders = {each.folder(tmp_path) for each in [made, *others]}
    assert len(folders) == 6
    assert json.loads((made.folder(tmp_path) / "key.json").read_text())["taps"] == list(TAPS)


def test_groups_are_by_length_and_within_the_budget() -> None:
    lengths = np.array([3, 50, 10, 10, 4, 9])
    groups = list(by_length(lengths, 30))
    assert groups == [[1], [2, 3, 5], [4, 0]]


def test_a_set_without_answers_is_refused() -> None:
    with pytest.raises(ValueError, match="no answer token among them"):
        conversations([4, 5], prompt=9)
