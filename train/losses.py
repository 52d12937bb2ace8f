"""Loss terms on draft logits, each a value a row, against the target's distribution.

With q the heads' distribution over the draft vocabulary, P the target's there (not renormalised: what is outside can
never be accepted), p the same renormalised, and α = Σ min(P, q), the chance that a token sampled from q is accepted:

==========  =============================  ==============================================================
soft_ce     −Σ p·log q                     EAGLE-3 (arXiv 2503.01840); what the quickstart uses
kl          Σ p·log(p/q)                   the same gradient; a figure that is 0 where nothing is left to learn
reverse_kl  Σ q·log(q/p)                   seeks one mode of p; JetSpec (arXiv 2606.18394) saw it lose a third
tv          1 − α                          total variation: acceptance itself; learns little while q is far from p
lk          −log α                         acceptance as a likelihood (LK losses, arXiv 2602.23881)
lk_mixed    λ·kl + (1 − λ)·tv, λ = e^−3α   from the one to the other as a row is learned; λ has no gradient (the same)
hard_ce     −log q(argmax p)               labels by the target's greedy choice
label_ce    −log q(next token)             labels from the text (Medusa, arXiv 2401.10774); 0 where it cannot be drafted
==========  =============================  ==============================================================

What each is worth on the embedded target: ``headstart losses``, and the table in README.md. Half-precision logits are
widened first: close to p the gradient is a difference of nearly equal numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from heads.judge import Criterion, Teacher
from heads.precision import as_written
from train.settings import SettingsError, suggest


class Rows:
    """Draft rows and the target's word on them, as the terms read it; all (n, Vd), float32 or wider."""

    def __init__(self, draft_logits: Tensor, teacher: Teacher) -> None:
        wide = torch.promote_types(draft_logits.dtype, torch.float32)
        self.log_q = draft_logits.to(wide).log_softmax(-1)
        self._said, self._teacher = teacher.logits.detach().to(wide), teacher

    @cached_property
    def log_p(self) -> Tensor:
        """Of the target, renormalised over the draft vocabulary."""
        return self._said.log_softmax(-1)

    @cached_property
    def log_whole(self) -> Tensor:
        """Of the target, over the whole vocabulary."""
        return self._said - self._teacher.lse.detach().to(self._said.dtype)[:, None]

    @property
    def label(self) -> Tensor:
        """(n,) draft ids of the text's own next tokens, -1 where they cannot be drafted.

        Raises:
            ValueError: the teacher does not know the text.
        """
        if self._teacher.label is None:
            raise ValueError("label_ce needs the text's own tokens, which this teacher was not given")
        return self._teacher.label


Term = Callable[[Rows], Tensor]  # → (n,)


def cross_entropy(log_q: Tensor, log_p: Tensor) -> Tensor:
    """−Σ p·log q, (n,) of (n, V) each."""
    return -(log_p.exp() * log_q).sum(-1)


def soft_ce(rows: Rows) -> Tensor:
    """Cross-entropy with the target's whole distribution."""
    return cross_entropy(rows.log_q, rows.log_p)


def kl(rows: Rows) -> Tensor:
    """Kullback-Leibler divergence from the heads to the target."""
    return (rows.log_p.exp() * (rows.log_p - rows.log_q)).sum(-1)


def reverse_kl(rows: Rows) -> Tensor:
    """Kullback-Leibler divergence from the target to the heads."""
    return (rows.log_q.exp() * (rows.log_q - rows.log_p)).sum(-1)


def tv(rows: Rows) -> Tensor:
    """What of q lies above P: the chance to be rejected."""
    return (rows.log_q.exp() - rows.log_whole.exp()).relu().sum(-1)


def lk(rows: Rows) -> Tensor:
    """Minus the log of the acceptance; computed on logs, so that it stays finite where P and q hardly meet."""
    return -torch.minimum(rows.log_whole, rows.log_q).logsumexp(-1)


def lk_mixed(rows: Rows) -> Tensor:
    """Divergence while little is accepted, acceptance itself as more is."""
    rejected = tv(rows)
    share = (-3 * (1 - rejected.detach())).exp()
    return share * kl(rows) + (1 - share) * rejected


def hard_ce(rows: Rows) -> Tensor:
    """Cross-entropy with the target's first choice among what can be drafted."""
    return functional.nll_loss(rows.log_q, rows.log_p.argmax(-1), reduction="none")


def label_ce(rows: Rows) -> Tensor:
    """Cross-entropy with the text's own next token."""
    return functional.nll_loss(rows.log_q, rows.label, reduction="none", ignore_index=-1)


TERMS: dict[str, Term] = {
    "soft_ce": soft_ce,
    "kl": kl,
    "reverse_kl": reverse_kl,
    "tv": tv,
    "lk": lk,
    "lk_mixed": lk_mixed,
    "hard_ce": hard_ce,
    "label_ce": label_ce,
}


def make_criterion(weights: Mapping[str, float]) -> Criterion:
    """A function from draft logits (n, Vd) and the teacher's to weighted named terms, each (n,).

    Args:
        weights: weight by name of a term in ``TERMS``; weight 0 leaves the term out.

    Raises:
        SettingsError: unknown name, a negative weight, or no term left.
    """
    for name, weight in weights.items():
        if name not in TERMS:
            raise SettingsError(f"train.loss: unknown term {name!r}: {suggest(name, TERMS)}")
        if not weight >= 0:
            raise SettingsError(f"train.loss.{name} is {weight}: a weight is 0 or more")
    used = {name: weight for name, weight in weights.items() if weight}
    if not used:
        raise SettingsError(f"train.loss has no term with a weight above 0; terms are {', '.join(TERMS)}")

    def criterion(draft_logits: Tensor, teacher: Teacher) -> dict[str, Tensor]:
        with as_written(draft_logits.device):
            rows = Rows(draft_logits, teacher)
            return {name: weight * TERMS[name](rows) for name, weight in used.items()}

    return criterion


def position_weights(wanted: tuple[float, ...] | None, heads_own: list[float]) -> list[float]:
    """Weights of the draft positions: the recipe's, or those the heads' ``position_decay`` gives.

    Raises:
        SettingsError: not one for each position, a negative one, or none above 0.
    """
    if wanted is None:
        return heads_own
    if len(wanted) != len(heads_own):
        raise SettingsError(
            f"train.position_weights has {len(wanted)} weights for a look-ahead of {len(heads_own)}: give one each"
        )
    if not all(weight >= 0 for weight in wanted) or not any(wanted):
        raise SettingsError(f"train.position_weights are {list(wanted)}: none may be below 0, and one must be above")
    return list(wanted)
