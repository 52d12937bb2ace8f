"""Loss terms on draft logits, each a value a row, all against the target's distribution on the draft vocabulary.

With p the target's distribution renormalised over the draft vocabulary and q the heads' (both float32 or wider):

========  ==================================  ==========================================================
soft_ce   −Σ p·log q                          EAGLE-3 (arXiv 2503.01840); what the quickstart uses
hard_ce   −log q(argmax p)                    labels by the target's greedy choice
tv        ½ Σ |p − q|                         1 − the chance that one sampled token is accepted
lk        −log Σ min(p, q)                    the same as a likelihood (LK losses, arXiv 2602.23881)
========  ==================================  ==========================================================

Half-precision logits are widened first: close to p the gradient is a difference of nearly equal numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from heads.judge import Criterion, Teacher
from train.settings import SettingsError, suggest

Term = Callable[[Tensor, Tensor], Tensor]  # (log q, log p), each (n, Vd) → (n,)


def soft_ce(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Cross-entropy with the target's whole distribution."""
    return -(log_p.exp() * log_q).sum(-1)


def hard_ce(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Cross-entropy with the target's first choice."""
    return functional.nll_loss(log_q, log_p.argmax(-1), reduction="none")


def tv(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Total variation."""
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)


def lk(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Minus the log of the overlap; computed on logs, so that it stays finite where p and q hardly meet."""
    return -torch.minimum(log_p, log_q).logsumexp(-1)


TERMS: dict[str, Term] = {"soft_ce": soft_ce, "hard_ce": hard_ce, "tv": tv, "lk": lk}


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
        wide = torch.promote_types(draft_logits.dtype, torch.float32)
        with torch.autocast(draft_logits.device.type, enabled=False):
            log_q = draft_logits.to(wide).log_softmax(-1)
            log_p = teacher.logits.detach().to(wide).log_softmax(-1)
            return {name: weight * TERMS[name](log_q, log_p) for name, weight in used.items()}

    return criterion
