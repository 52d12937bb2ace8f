"""EAGLE-1 heads: what they start from, the loss on states, what is for training alone."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from heads.config import ConfigError
from heads.eagle1 import Eagle1
from heads.kinds import build, make_config
from tests.heads.small import batch_of, random_ids, relative, small_heads, small_target, soft_ce


def random_eagle1(**options: Any) -> Eagle1:
    """Every weight random."""
    return cast(Eagle1, small_heads("eagle1", small_target(), **options))


def built(taps: tuple[int, ...] | None = None, **options: Any) -> Eagle1:
    """As training starts from."""
    made = build(make_config("eagle1", small_target(), lookahead=3, taps=taps, options=options), small_target())
    made.initialize()
    return cast(Eagle1, made.double().eval())


def test_it_starts_as_the_targets_next_token_head() -> None:
    made = built()
    batch = batch_of(made.target, made.config.taps, random_ids(12))
    for step in made.unroll(batch):
        assert relative(step.logits, made.target.project(batch.hidden[step.batch, step.row])) < 1e-12


@pytest.mark.parametrize("weight", [1.0, 0.25, 0.0])
def test_the_loss_on_states_is_smooth_l1_with_the_targets_next_one(weight: float) -> None:
    """Half the square of a difference below 1, the difference less a half above, a mean over the width."""
    made = random_eagle1(feature_weight=weight)
    batch = batch_of(made.target, made.config.taps, random_ids(14), random_ids(14, seed=4, vocab=2).bool())
    steps = list(made.unroll(batch))
    report = made.loss(batch, lambda draft, teacher: {"none": 0.0 * draft.sum(-1)})
    if not weight:
        assert set(report.terms) == {"none"} and float(report.total.detach()) == 0
        return
    seen = False
    for j, step in enumerate(steps):
        out, wanted = step.states.detach(), 0.0
        for n, row in enumerate(step.row.tolist()):
            if row + 2 + j < 14 and batch.loss_mask[0, row + 2 + j]:
                gaps = (out[n] - batch.hidden[0, row + 1 + j]).abs()
                seen |= bool((gaps > 1).any()) and bool((gaps < 1).any())
                wanted += weight * float(torch.where(gaps < 1, gaps**2 / 2, gaps - 0.5).mean())
        assert float(report.terms["feature"][j]) == pytest.approx(wanted, rel=1e-6)
    assert seen and float(report.total.detach()) == pytest.approx(float(report.terms["feature"].sum()), rel=1e-6)


def test_both_losses_reach_every_weight() -> None:
    made = random_eagle1()
    batch = batch_of(made.target, made.config.taps, random_ids(12))
    made.loss(batch, lambda draft, teacher: {"none": 0.0 * draft.sum(-1)}).total.backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in made.parameters())
    for p in made.parameters():
        p.grad = None
    made.config.options["feature_weight"] = 0.0
    made.loss(batch, soft_ce).total.backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in made.parameters())


def test_noise_is_for_training_alone_and_as_wide_as_it_says() -> None:
    made = random_eagle1(noise=0.1)
    taps = torch.zeros(1, 50, 32, dtype=torch.float64)
    assert not bool(made.fuse(taps).any())
    made.train()
    noise = made.fuse(taps)
    assert 0.09 < float(noise.max()) <= 0.1 and -0.1 <= float(noise.min()) < -0.09
    assert not torch.equal(noise, made.fuse(taps))


def test_detached_steps_leave_earlier_ones_alone() -> None:
    """The deepest position's loss reaches weights through its own step only: the same as if its state were data."""
    made = random_eagle1(detach=True, feature_weight=0.0)
    batch = batch_of(made.target, made.config.taps, random_ids(12))
    fed: list[torch.Tensor] = []
    original = made.feed_back

    def feed_back(out: torch.Tensor) -> torch.Tensor:
        fed.append(original(out))
        return fed[-1]

    made.__dict__["feed_back"] = feed_back
    list(made.unroll(batch))
    assert len(fed) == 3 and not any(state.requires_grad for state in fed)
    made.config.options["detach"] = False
    fed.clear()
    list(made.unroll(batch))
    assert all(state.requires_grad for state in fed)


@pytest.mark.parametrize(
    ("taps", "options", "message"),
    [
        ((2,), {}, r"their only tap is 4 here, not \[2\]"),
        ((1, 4), {}, r"their only tap is 4 here, not \[1, 4\]"),
        (None, {"noise": -0.1}, "feature_weight and noise must be 0 or more"),
        (None, {"feature_weight": -1}, "feature_weight and noise must be 0 or more"),
        (None, {"window": -3}, "window must be a whole number from 0"),
    ],
)
def test_what_cannot_be_is_refused(taps: tuple[int, ...] | None, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(taps, **options)
