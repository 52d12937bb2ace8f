"""How drafted distributions are judged in training: rows, the target's word on them, loss and acceptance.

Logits over a vocabulary are large (rows × thousands) and every pass over them leaves the processor's cache, so
they are judged in chunks of rows: loss, gradient and acceptance of one chunk while it is hot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from heads.target import Target

CHUNK_ENTRIES = 1 << 19  # logits judged at a time: 2 MB in float32, a core's second-level cache


@dataclass
class TrainingBatch:
    """Conversations with what the target felt while reading them; padded on the right.

    Attributes:
        ids: (B, T) int64.
        loss_mask: (B, T) bool, token t is one the target says (answer or end of turn).
        mask: (B, T) bool, token t is there.
        taps: (B, T, taps·H).
        hidden: (B, T, H) post-norm last hidden state; with the output matrix it gives the target's logits.
        top: (B, T) int64, arg-max of the target's logits at t.
        lse: (B, T) float32, log-sum-exp of the target's logits at t over the whole vocabulary.
    """

    ids: Tensor
    loss_mask: Tensor
    mask: Tensor
    taps: Tensor
    hidden: Tensor
    top: Tensor
    lse: Tensor

    def to(self, device: torch.device | str) -> TrainingBatch:
        """The batch on another device."""
        return TrainingBatch(**{name: value.to(device) for name, value in vars(self).items()})


@dataclass
class Teacher:
    """The target's word on n positions: logits (n, Vd) over the draft vocabulary, lse (n,) over the whole one."""

    logits: Tensor
    lse: Tensor


Criterion = Callable[[Tensor, Teacher], dict[str, Tensor]]
"""Draft logits (n, Vd) and the teacher's → named loss terms (n,), already weighted; their sum is minimized."""


@dataclass
class UnrollStep:
    """One draft position j of a training unroll.

    Attributes:
        logits: (n, Vd) of the token at ``row + 2 + j``.
        batch, row: (n,) which text, and which position's state they were drafted from; the same for every j.
        confidence: (n,) logits of the chance that the tokens are accepted, where heads tell one.
    """

    logits: Tensor
    batch: Tensor
    row: Tensor
    confidence: Tensor | None = None


class TeacherRows:
    """The target's logits at the positions a batch is judged by, computed once for all draft positions."""

    def __init__(self, target: Target, batch: TrainingBatch, draft_ids: Tensor | None) -> None:
        self.length, self.draft_ids = batch.ids.shape[1], draft_ids
        says = torch.zeros_like(batch.loss_mask)
        says[:, :-1] = batch.loss_mask[:, 1:]  # position t is judged when token t + 1 is the target's own
        self.place = torch.full(says.shape, -1, device=says.device)
        self.place[says] = torch.arange(int(says.sum()), device=says.device)
        with torch.no_grad():
            self.logits = target.project_rows(batch.hidden[says].to(target.dtype), draft_ids)
        self.lse, self.top = batch.lse[says], batch.top[says]

    def rows(self, step: UnrollStep, j: int) -> tuple[TeacherRows, Tensor]:
        """For each row of a step the teacher's row (n,) that judges it, -1 where none does."""
        at = step.row + 1 + j
        found = self.place[step.batch, at.clamp(max=self.length - 1)]
        return self, torch.where(at < self.length, found, -1)


@dataclass
class Judged:
    """One draft position: differentiable loss sum, term sums, rows counted, hits (n,) bool, overlaps (n,)."""

    loss: Tensor
    terms: dict[str, Tensor]
    count: Tensor
    hit: Tensor
    overlap: Tensor


def judge(
    logits: Tensor,
    teacher: TeacherRows,
    rows: Tensor,
    criterion: Criterion,
    *,
    measure: bool,
    confidence: Tensor | None = None,
    confidence_weight: float = 1.0,
) -> Judged:
    """Judge draft logits (n, Vd) by the teacher rows (n,) that answer for them (-1: not counted).

    Args:
        measure: fill hits and overlaps; zeros otherwise.
        confidence: (n,) logits of the chance that a token sampled from the draft logits is accepted, Σ min(p, q);
            cross-entropy with that chance is one more term, which does not reach back into the draft logits.
        confidence_weight: of that term.
    """
    counted = (rows >= 0).nonzero()[:, 0]
    found = Judged(
        loss=logits.new_zeros(()),
        terms={},
        count=torch.tensor(counted.shape[0], device=logits.device),
        hit=torch.zeros(rows.shape, dtype=torch.bool, device=logits.device),
        overlap=torch.zeros(rows.shape, dtype=torch.float64, device=logits.device),
    )
    wants = measure or confidence is not None
    found.loss = _Chunked.apply(logits, found, teacher, rows, counted, criterion, wants)
    if confidence is not None:
        wide = torch.promote_types(confidence.dtype, torch.float32)
        told, chance = confidence[counted].to(wide), found.overlap[counted].clamp(0, 1).to(wide)
        with torch.autocast(logits.device.type, enabled=False):
            term = functional.binary_cross_entropy_with_logits(told, chance, reduction="sum") * confidence_weight
        found.loss, found.terms["confidence"] = found.loss + term, term.detach()
    if not measure:
        found.hit, found.overlap = torch.zeros_like(found.hit), torch.zeros_like(found.overlap)
    return found


class _Chunked(torch.autograd.Function):
    """Sum of a criterion over rows; the gradient is taken chunk by chunk in the forward pass and kept."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        found: Judged,
        teacher: TeacherRows,
        rows: Tensor,
        counted: Tensor,
        criterion: Criterion,
        measure: bool,
    ) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        wants = ctx.needs_input_grad[0]
        gradient = torch.zeros_like(logits) if wants else None
        total = torch.zeros((), dtype=wide, device=logits.device)
        for part in counted.split(max(1, CHUNK_ENTRIES // logits.shape[1])):
            word = Teacher(teacher.logits[rows[part]], teacher.lse[rows[part]])
            own = logits[part].to(wide)
            with torch.enable_grad(), torch.autocast(logits.device.type, enabled=False):
                values = criterion(own.requires_grad_(wants), word)
                loss = torch.stack(list(values.values())).sum()
            if gradient is not None:
                gradient[part] = torch.autograd.grad(loss, own)[0].to(logits.dtype)
            total += loss.detach()
            for name, value in values.items():
                found.terms[name] = found.terms.get(name, 0) + value.detach().sum()
            if measure:
                _measure(own.detach(), word, teacher, rows[part], part, found)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0].to(gradient.dtype), None, None, None, None, None, None


def _measure(own: Tensor, word: Teacher, teacher: TeacherRows, rows: Tensor, part: Tensor, found: Judged) -> None:
    """Fill hits (arg-max equals the target's) and overlaps, Σ min(p, q) with p over the whole vocabulary."""
    best = own.argmax(-1)
    found.hit[part] = (best if teacher.draft_ids is None else teacher.draft_ids[best]) == teacher.top[rows]
    p = (word.logits.to(own.dtype) - word.lse[:, None].to(own.dtype)).exp_()
    found.overlap[part] = torch.minimum(own.softmax(-1), p).sum(-1).double()
