"""Half precision: gradients near the target, and wide heads on a narrow target."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from heads.judge import Criterion, Teacher
from tests.heads.scripted import Scripted, Table, batch_from
from tests.heads.small import batch_of, number, random_ids, small_heads, small_target, soft_ce


def test_bfloat16_gradients_are_within_a_percent() -> None:
    """Close to the target the gradient is a difference of nearly equal numbers."""
    vocab, rows = 32000, 4
    said = 3 * torch.randn(1, rows + 2, vocab)
    drafted = (said[:, 1:-1] + 0.05 * torch.randn(1, rows, vocab)).bfloat16()
    said = said.bfloat16()

    class Half(Table):
        dtype = torch.bfloat16

    def gradient(dtype: torch.dtype, criterion: Criterion) -> Tensor:
        logits = torch.zeros(1, 1, rows + 2, vocab, dtype=dtype)
        logits[0, :, :rows] = drafted.to(dtype)
        heads = Scripted(logits, vocab)
        heads.__dict__["target"] = Half(vocab) if dtype == torch.bfloat16 else Table(vocab)
        report = heads.loss(batch_from(said.to(dtype), torch.ones(1, rows + 2, dtype=torch.bool)), criterion)
        assert report.counts.tolist() == [rows]
        report.total.backward()
        assert heads.table.grad is not None and heads.table.grad.dtype == dtype
        return heads.table.grad[0, 0, :rows].double()

    def naive(draft: Tensor, teacher: Teacher) -> dict[str, Tensor]:
        return {"kl": -(teacher.logits.softmax(-1) * draft.to(torch.bfloat16).log_softmax(-1)).sum(-1)}

    exact = gradient(torch.float64, soft_ce)

    def error(found: Tensor) -> float:
        return float((found - exact).norm() / exact.norm())

    assert error(gradient(torch.bfloat16, soft_ce)) < 0.01
    assert error(gradient(torch.bfloat16, naive)) > 0.02, "the input shows the fault where it is there"


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
@pytest.mark.parametrize("draft_vocab", [None, 11])
def test_wide_heads_learn_on_a_half_precision_target(kind: str, draft_vocab: int | None) -> None:
    target = small_target(dtype=torch.bfloat16)
    heads = small_heads(kind, target, draft_vocab=draft_vocab).float()
    batch = batch_of(target, heads.config.taps, random_ids(10))
    exact = small_heads(kind, small_target(), draft_vocab=draft_vocab)
    exact.load_state_dict(heads.state_dict())
    wide = batch_of(small_target(), heads.config.taps, random_ids(10))
    theirs = number(exact.loss(wide, soft_ce).total)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            report = heads.loss(batch, soft_ce)
        assert number(report.total) == pytest.approx(theirs, rel=0.1)
        report.total.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in heads.parameters())
