"""Loss terms against plain formulas, and where half precision would go wrong."""

from __future__ import annotations

import math

import pytest
import torch

from heads import Teacher
from train.losses import TERMS, make_criterion, position_weights
from train.settings import SettingsError


def teacher(logits: torch.Tensor, beyond: float = 0.0) -> Teacher:
    """A target that gives a share ``beyond`` of its probability to tokens that cannot be drafted."""
    lse = logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1) - math.log(1 - beyond)
    return Teacher(logits, lse, torch.arange(len(logits)) % (logits.shape[1] + 1) - 1)


def test_terms_are_what_their_names_say() -> None:
    draft, target = torch.randn(7, 5, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    q, p = draft.softmax(-1), target.softmax(-1)
    values = make_criterion(dict.fromkeys(TERMS, 1.0))(draft, teacher(target, beyond=0.2))
    alpha = torch.minimum(0.8 * p, q).sum(-1)
    mixture = torch.exp(-3 * alpha)
    label = -q.log()[torch.arange(7), [-1, 0, 1, 2, 3, 4, -1]]
    expected = {
        "soft_ce": -(p * q.log()).sum(-1),
        "kl": (p * (p / q).log()).sum(-1),
        "reverse_kl": (q * (q / p).log()).sum(-1),
        "tv": 1 - alpha,
        "lk": -alpha.log(),
        "lk_mixed": mixture * (p * (p / q).log()).sum(-1) + (1 - mixture) * (1 - alpha),
        "hard_ce": -q.log()[torch.arange(7), p.argmax(-1)],
        "label_ce": torch.where(torch.tensor([False, True, True, True, True, True, False]), label, 0),
    }
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(values[name], value, rtol=1e-12, atol=1e-12)


def test_values_by_hand() -> None:
    """p = ½, ¼, ¼ and q = ¼, ¼, ½, all of p draftable."""
    p, q = torch.tensor([[0.5, 0.25, 0.25]]).double(), torch.tensor([[0.25, 0.25, 0.5]]).double()
    values = make_criterion(dict.fromkeys(TERMS, 1.0))(q.log(), Teacher(p.log(), torch.zeros(1), torch.tensor([2])))
    two = math.log(2)
    found = {name: float(value) for name, value in values.items()}
    assert found["soft_ce"] == pytest.approx(1.75 * two)  # ½·2 + ¼·2 + ¼·1
    assert found["kl"] == pytest.approx(0.25 * two) and found["reverse_kl"] == pytest.approx(0.25 * two)
    assert found["tv"] == pytest.approx(0.25) and found["lk"] == pytest.approx(-math.log(0.75))
    assert found["lk_mixed"] == pytest.approx(0.10539922 * 0.25 * two + 0.89460078 * 0.25)  # e^-2.25
    assert found["hard_ce"] == pytest.approx(2 * two) and found["label_ce"] == pytest.approx(two)


def gradient(name: str, draft: torch.Tensor, word: Teacher) -> torch.Tensor:
    logits = draft.clone().requires_grad_()
    make_criterion({name: 1.0})(logits, word)[name].sum().backward()
    assert logits.grad is not None
    return logits.grad


def test_the_mixture_has_no_gradient_through_its_share() -> None:
    draft, target = torch.randn(4, 9, dtype=torch.float64), torch.randn(4, 9, dtype=torch.float64)
    word = teacher(target)
    share = (-3 * torch.minimum(draft.softmax(-1), target.softmax(-1)).sum(-1, keepdim=True)).exp()
    wanted = share * gradient("kl", draft, word) + (1 - share) * gradient("tv", draft, word)
    torch.testing.assert_close(gradient("lk_mixed", draft, word), wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient("kl", draft, word), gradient("soft_ce", draft, word), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["tv", "lk", "lk_mixed"])
def test_acceptance_losses_fall_with_what_is_rejected(name: str) -> None:
    """A step against the gradient raises Σ min(P, q), P with its share outside the draft vocabulary."""
    draft, word = torch.randn(5, 30, dtype=torch.float64), teacher(torch.randn(5, 30, dtype=torch.float64), 0.3)
    p = (word.logits - word.lse[:, None]).exp()
    better = draft - 1e-3 * gradient(name, draft, word)
    before, after = (torch.minimum(logits.softmax(-1), p).sum(-1) for logits in (draft, better))
    assert bool((after > before).all())


def test_weights_are_in_the_terms_and_zero_leaves_one_out() -> None:
    draft, target = torch.randn(3, 5), torch.randn(3, 5)
    one = make_criterion({"soft_ce": 1.0})(draft, teacher(target))
    many = make_criterion({"soft_ce": 0.1, "tv": 0.0, "lk": 2.0})(draft, teacher(target))
    assert list(many) == ["soft_ce", "lk"]
    torch.testing.assert_close(many["soft_ce"], 0.1 * one["soft_ce"])


@pytest.mark.parametrize("name", ["soft_ce", "kl", "reverse_kl", "lk_mixed"])
def test_the_gradient_survives_bf16_logits_close_to_the_targets(name: str) -> None:
    """Vocabulary 32,000, draft almost equal to the target, both bf16: within 1% of float64."""
    torch.manual_seed(0)
    target = (3 * torch.randn(4, 32000)).bfloat16()
    draft = (target.float() + 0.05 * torch.randn(4, 32000)).bfloat16()
    ours = gradient(name, draft, teacher(target)).double()
    right = gradient(name, draft.double(), teacher(target.double()))
    assert float((ours - right).norm() / right.norm()) < 0.01


def test_a_loss_taken_in_half_precision_would_have_lost_it() -> None:
    """What the test above guards against: the same formula on bf16 numbers is more than five times as far off."""
    torch.manual_seed(0)
    target = (3 * torch.randn(4, 32000)).bfloat16()
    draft = (target.float() + 0.05 * torch.randn(4, 32000)).bfloat16()
    logits = draft.clone().requires_grad_()
    p = target.softmax(-1)
    (p * (p.log() - logits.log_softmax(-1))).sum().backward()
    assert logits.grad is not None
    right = gradient("kl", draft.double(), teacher(target.double()))
    assert float((logits.grad.double() - right).norm() / right.norm()) > 0.05


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


def test_a_teacher_without_the_text_cannot_label() -> None:
    with pytest.raises(ValueError, match="label_ce needs the text's own tokens"):
        make_criterion({"label_ce": 1.0})(torch.randn(2, 3), Teacher(torch.randn(2, 3), torch.zeros(2)))


def test_weights_by_position() -> None:
    assert position_weights(None, [1.0, 0.8]) == [1.0, 0.8]
    assert position_weights((0.0, 3.0), [1.0, 0.8]) == [0.0, 3.0]
    for wrong, message in (((1.0,), "has 1 weights for a look-ahead of 2"), ((1.0, -1.0), "none may be below 0"),
                           ((0.0, 0.0), "one must be above")):  # fmt: skip
        with pytest.raises(SettingsError, match=message):
            position_weights(wrong, [1.0, 0.8])
