"""Loss terms against plain formulas, and where half precision would go wrong."""

from __future__ import annotations

import pytest
import torch

from heads import Teacher
from train.losses import TERMS, make_criterion
from train.settings import SettingsError


def teacher(logits: torch.Tensor) -> Teacher:
    return Teacher(logits, logits.logsumexp(-1))


def test_terms_are_what_their_names_say() -> None:
    draft, target = torch.randn(7, 11, dtype=torch.float64), torch.randn(7, 11, dtype=torch.float64)
    q, p = draft.softmax(-1), target.softmax(-1)
    values = make_criterion(dict.fromkeys(TERMS, 1.0))(draft, teacher(target))
    overlap = torch.minimum(p, q).sum(-1)
    expected = {
        "soft_ce": -(p * q.log()).sum(-1),
        "hard_ce": -q.log()[torch.arange(7), p.argmax(-1)],
        "tv": 1 - overlap,
        "lk": -overlap.log(),
    }
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(values[name], value, rtol=1e-12, atol=1e-12)


def test_weights_are_in_the_terms_and_zero_leaves_one_out() -> None:
    draft, target = torch.randn(3, 5), torch.randn(3, 5)
    one = make_criterion({"soft_ce": 1.0})(draft, teacher(target))
    many = make_criterion({"soft_ce": 0.1, "tv": 0.0, "lk": 2.0})(draft, teacher(target))
    assert list(many) == ["soft_ce", "lk"]
    torch.testing.assert_close(many["soft_ce"], 0.1 * one["soft_ce"])


def test_the_gradient_survives_bf16_logits_close_to_the_targets() -> None:
    """Vocabulary 32,000, draft almost equal to the target, both bf16: within 1% of float64."""
    target = (3 * torch.randn(4, 32000)).bfloat16()
    half = (target.float() + 0.05 * torch.randn(4, 32000)).bfloat16()
    gradients = []
    for draft in (half, half.double()):
        logits = draft.clone().requires_grad_()
        make_criterion({"soft_ce": 1.0})(logits, teacher(target))["soft_ce"].sum().backward()
        assert logits.grad is not None
        gradients.append(logits.grad.double())
    assert float((gradients[0] - gradients[1]).norm() / gradients[1].norm()) < 0.01


def test_no_gradient_reaches_the_teacher_and_far_distributions_stay_finite() -> None:
    target = torch.tensor([[200.0, 0.0, 0.0]], requires_grad=True)
    draft = torch.tensor([[0.0, 0.0, 200.0]], requires_grad=True)
    total = torch.stack(list(make_criterion(dict.fromkeys(TERMS, 1.0))(draft, teacher(target)).values())).sum()
    total.backward()
    assert target.grad is None
    assert draft.grad is not None
    assert torch.isfinite(total) and torch.isfinite(draft.grad).all()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"soft_cee": 1.0}, "unknown term 'soft_cee': did you mean soft_ce"),
        ({"lk": -1.0}, r"train\.loss\.lk is -1\.0"),
        ({"lk": 0.0}, "no term with a weight above 0"),
    ],
)
def test_wrong_weights(weights: dict[str, float], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make_criterion(weights)
