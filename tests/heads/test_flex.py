"""Flex attention of the unroll gives what the plain one gives; on a CPU it is compared only, training is refused."""

from __future__ import annotations

import pytest
import torch

from heads.flex import attend_flex
from tests.heads.small import batch_of, random_ids, relative, small_heads, small_target, soft_ce


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_it_gives_the_logits_of_the_plain_one(kv_heads: int) -> None:
    """Packed texts, untrained rows and several steps included."""
    target = small_target(dtype=torch.float32)
    heads = small_heads("eagle", target, lookahead=4, num_key_value_heads=kv_heads, head_dim=16)
    mask = random_ids(20, rows=2, seed=3, vocab=2).bool()
    batch = batch_of(target, heads.config.taps, random_ids(20, rows=2), mask)
    batch.documents = torch.tensor([[1] * 12 + [2] * 8, [1] * 5 + [2] * 15])
    batch.loss_mask &= batch.positions >= 2
    with torch.no_grad():
        plain = [step.logits for step in heads.unroll(batch)]
        heads.attention = "flex"
        for step, wanted in zip(heads.unroll(batch), plain, strict=True):
            assert relative(step.logits, wanted) < 1e-5


def test_training_with_it_on_a_cpu_is_refused() -> None:
    target = small_target(dtype=torch.float32)
    heads = small_heads("eagle", target)
    heads.attention = "flex"
    batch = batch_of(target, heads.config.taps, random_ids(12))
    with pytest.raises(ValueError, match=r"no backward pass on cpu: set train\.attention to plain"):
        heads.loss(batch, soft_ce)
    q = torch.randn(1, 4, 3, 16)
    with torch.no_grad():
        assert attend_flex(q, q, q, torch.ones(1, 3, 3, dtype=torch.bool).tril(), []).shape == q.shape
