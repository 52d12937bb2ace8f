"""Steps do not depend on how many processes or micro-batches there are, and everything is in exactly one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.batches import plan_epoch, split_step
from train.config import TrainConfig
from train.schedule import learning_rate

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=80).map(lambda values: np.array(values))


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(50, 900), st.integers(1, 9), st.integers(0, 5))
def test_an_epoch_holds_each_conversation_once(lengths: np.ndarray, tokens: int, bucket: int, epoch: int) -> None:
    steps = plan_epoch(lengths, tokens, bucket, 7, epoch)
    assert sorted(i for step in steps for i in step) == list(range(len(lengths)))
    assert all(steps)
    assert steps == plan_epoch(lengths, tokens, bucket, 7, epoch)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(50, 900), st.integers(1, 5))
def test_processes_share_a_step_and_take_equally_many_passes(lengths: np.ndarray, micro: int, processes: int) -> None:
    shares = split_step(list(range(len(lengths))), lengths, micro, processes)
    assert len(shares) == processes
    assert len({len(share) for share in shares}) == 1
    counted = [i for share in shares for one in share if one.counts for i in one.indices]
    assert sorted(counted) == list(range(len(lengths)))
    for one in (one for share in shares for one in share):
        assert len(one.indices) == 1 or len(one.indices) * max(lengths[list(one.indices)]) <= micro


def test_a_filler_only_where_conversations_do_not_go_round() -> None:
    lengths = np.array([5, 6, 7])
    (first,), (second,) = split_step([0, 1], lengths, 100, 2)
    assert first.counts and second.counts
    (first,), (second,) = split_step([2], lengths, 100, 2)
    assert first.counts and not second.counts


def test_steps_are_of_like_length_and_size() -> None:
    lengths = np.random.default_rng(0).integers(20, 400, 400)
    steps = plan_epoch(lengths, 4000, 8, 0, 0)
    sizes = [int(lengths[step].sum()) for step in steps]
    padded = sum(int(lengths[step].max()) * len(step) for step in steps)
    assert abs(len(steps) - lengths.sum() / 4000) <= 2
    assert min(sizes) > 2500
    assert padded < 1.25 * lengths.sum()
    assert steps != plan_epoch(lengths, 4000, 8, 0, 1)


def test_linear_schedule_counts_optimizer_steps() -> None:
    """Eight rows, one a micro-batch, four a step, two epochs: four steps with literal rates."""
    lengths = np.full(8, 10)
    steps = [step for epoch in range(2) for step in plan_epoch(lengths, 40, 8, 0, epoch)]
    assert [len(split_step(step, lengths, 10, 1)[0]) for step in steps] == [4, 4, 4, 4]
    settings = TrainConfig(lr=1e-3, schedule="linear")
    assert [learning_rate(step, 4, settings) for step in range(4)] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])


def test_cosine_with_warm_up() -> None:
    settings = TrainConfig(lr=1.0, warmup_steps=3, final_lr=0.1)
    rates = [learning_rate(step, 13, settings) for step in range(14)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[8] == pytest.approx(0.55)
    assert rates[13] == pytest.approx(0.1)
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert learning_rate(9, 10, TrainConfig(lr=2.0, schedule="constant")) == 2.0
