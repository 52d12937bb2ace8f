"""Loss, gradient and acceptance of a training unroll without ever holding its logits.

Logits are rows × vocabulary, far more than the states they come from. So they are made a part at a time, by both
sides, judged, differentiated and forgotten; what is kept is as large as states and weights::

    for a part of the target's rows          the target's logits of them, once for all draft positions
        for each draft position j            draft logits of the rows that they judge
            for a few rows                   terms, and the gradient of their sum, while they are hot in the cache
            gradient of the logits  ──►      gradients of states and of the output's weights, added up

The gradient is taken in the forward pass: a backward pass would have to make all logits again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from heads.judge import Criterion, Teacher, TeacherRows, UnrollStep
from heads.precision import as_written

CHUNK_ENTRIES = {"cpu": 1 << 19}  # logits judged at a time: 2 MB in float32, a core's second-level cache
CHUNK_ELSEWHERE = 1 << 24  # an accelerator wants large kernels
PASS_ENTRIES = 1 << 23  # logits made at a time, but of no fewer rows than PASS_ROWS: matrix products want some
PASS_ROWS = 256


@dataclass
class Judged:
    """One draft position: sums of its terms, rows counted, hits (n,) bool, overlaps (n,) float64."""

    terms: dict[str, Tensor]
    count: Tensor
    hit: Tensor
    overlap: Tensor


def judge(
    steps: Sequence[UnrollStep],
    teacher: TeacherRows,
    criterion: Criterion,
    weights: Sequence[float],
    *,
    measure: bool,
    confidence_weight: float = 1.0,
) -> tuple[Tensor, list[Judged]]:
    """Judge all draft positions of an unroll.

    Where steps tell a confidence (logits of the chance that a token sampled from the draft is accepted, Σ min(p, q)),
    cross-entropy with that chance is one more term, which does not reach back into the draft logits.

    Args:
        weights: of each draft position in the sum.
        measure: fill hits and overlaps; zeros otherwise.
        confidence_weight: of the term of confidence.

    Returns:
        The differentiable sum of all terms over rows and, by weight, positions; and what was seen at each position.
    """
    work = [
        _Position(step, teacher.rows(step, j), weight)
        for j, (step, weight) in enumerate(zip(steps, weights, strict=True))
    ]
    confident = steps[0].confidence is not None
    judging = _Judging(work, teacher, criterion, measure=measure or confident, learn=torch.is_grad_enabled())
    total = _Chunked.apply(judging, *(step.states for step in steps), *judging.parameters)
    for position in work:
        confidence, seen = position.step.confidence, position.found
        if confidence is not None:
            counted = position.rows >= 0
            wide = torch.promote_types(confidence.dtype, torch.float32)
            told, chance = confidence[counted].to(wide), seen.overlap[counted].clamp(0, 1).to(wide)
            with as_written(told.device):
                term = functional.binary_cross_entropy_with_logits(told, chance, reduction="sum") * confidence_weight
            total, seen.terms["confidence"] = total + position.weight * term, term.detach()
        for name, values in position.step.terms.items():
            term = values[position.rows >= 0].sum()
            total, seen.terms[name] = total + position.weight * term, term.detach()
        if not measure:
            seen.hit, seen.overlap = torch.zeros_like(seen.hit), torch.zeros_like(seen.overlap)
    return total, [position.found for position in work]


class _Position:
    """A step, the teacher's rows (n,) that judge its own, and what is found."""

    def __init__(self, step: UnrollStep, rows: Tensor, weight: float) -> None:
        self.step, self.rows, self.weight = step, rows, weight
        self.parameters = step.output.weights()
        device = step.states.device
        self.found = Judged(
            terms={},
            count=(rows >= 0).sum(),
            hit=torch.zeros(rows.shape, dtype=torch.bool, device=device),
            overlap=torch.zeros(rows.shape, dtype=torch.float64, device=device),
        )

    def by_part(self, size: int, parts: int) -> list[Tensor]:
        """For each part of ``size`` of the teacher's rows, which of the step's rows it judges."""
        counted = (self.rows >= 0).nonzero()[:, 0]
        places = self.rows[counted]
        order = places.argsort(stable=True)
        return list(counted[order].split(torch.bincount(places // size, minlength=parts).tolist()))


class _Judging:
    """The loops of :func:`judge`, and the gradients they add up: of each step's states, then of each parameter."""

    def __init__(
        self, work: Sequence[_Position], teacher: TeacherRows, criterion: Criterion, *, measure: bool, learn: bool
    ) -> None:
        self.work, self.teacher, self.criterion, self.measure, self.learn = work, teacher, criterion, measure, learn
        every = {id(p): p for position in work for p in position.parameters}
        self.parameters, self._number = list(every.values()), {key: at for at, key in enumerate(every)}
        self.gradients: list[Tensor | None] = []

    def run(self, inputs: Sequence[Tensor]) -> Tensor:
        """The weighted sum of all terms; fills ``gradients``, one for each input that wants one."""
        self.gradients = [torch.zeros_like(each) if self.learn and each.requires_grad else None for each in inputs]
        teacher, states = self.teacher, inputs[: len(self.work)]
        size = max(PASS_ROWS, PASS_ENTRIES // teacher.width)
        parts = [slice(at, at + size) for at in range(0, max(1, len(teacher)), size)]
        rows = [position.by_part(size, len(parts)) for position in self.work]
        total = torch.zeros((), dtype=torch.promote_types(states[0].dtype, torch.float32), device=states[0].device)
        for number, part in enumerate(parts):
            said = teacher.logits(part)
            for j, position in enumerate(self.work):
                mine = rows[j][number]
                if len(mine) or not number:  # the first part names the terms, whether it has rows or not
                    total += self._part(j, mine, states[j], said, part.start) * position.weight
        return total

    def _part(self, j: int, rows: Tensor, states: Tensor, said: Tensor, start: int) -> Tensor:
        """Sum of the terms of some rows of a position, whose teacher's logits are among ``said``."""
        position, of_states = self.work[j], self.gradients[j]
        learn = of_states is not None or (self.learn and bool(position.parameters))
        some = states.detach()[rows].requires_grad_(of_states is not None)
        with torch.set_grad_enabled(learn):
            logits = position.step.output.project(some, rows)
        gradient = torch.empty_like(logits) if learn else None
        with as_written(logits.device):
            total = self._judge(position, rows, logits.detach(), said, start, gradient)
            if gradient is not None:
                wanted = [*([] if of_states is None else [some]), *position.parameters]
                found = list(torch.autograd.grad(logits, wanted, gradient, allow_unused=True))
                if of_states is not None:
                    of_states[rows] = found.pop(0)
                for parameter, value in zip(position.parameters, found, strict=True):
                    total_of = self.gradients[len(self.work) + self._number[id(parameter)]]
                    if value is not None and total_of is not None:
                        total_of.add_(value)
        return total

    def _judge(
        self, position: _Position, rows: Tensor, logits: Tensor, said: Tensor, start: int, gradient: Tensor | None
    ) -> Tensor:
        """Terms of logits (m, Vd), a few rows at a time; fills the ``gradient`` of their weighted sum."""
        found, wide = position.found, torch.promote_types(logits.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=logits.device)
        size = max(1, CHUNK_ENTRIES.get(logits.device.type, CHUNK_ELSEWHERE) // logits.shape[1])
        places = position.rows[rows]
        for few in (slice(at, at + size) for at in range(0, max(1, len(rows)), size)):  # no rows name the terms too
            place = places[few]
            word = self.teacher.word(said[place - start], place)
            own = logits[few].to(wide).requires_grad_(gradient is not None)
            with torch.set_grad_enabled(gradient is not None):
                values = self.criterion(own, word)
                loss = torch.stack(list(values.values())).sum()
            if gradient is not None:
                gradient[few] = torch.autograd.grad(loss, own)[0] * position.weight
            total += loss.detach()
            for name, value in values.items():
                found.terms[name] = found.terms.get(name, 0) + value.detach().sum()
            if self.measure:
                self._measure(found, own.detach(), word, rows[few], place)
        return total

    def _measure(self, found: Judged, own: Tensor, word: Teacher, rows: Tensor, place: Tensor) -> None:
        """Hits (arg-max equals the target's) and overlaps, Σ min(p, q) with p over the whole vocabulary."""
        best, ids = own.argmax(-1), self.teacher.draft_ids
        found.hit[rows] = (best if ids is None else ids[best]) == self.teacher.top[place]
        p = (word.logits.to(own.dtype) - word.lse[:, None].to(own.dtype)).exp_()
        found.overlap[rows] = torch.minimum(own.softmax(-1), p).sum(-1).double()


class _Chunked(torch.autograd.Function):
    """The sum as a function of states and parameters; gradients are kept from the forward pass."""

    @staticmethod
    def forward(ctx: Any, judging: _Judging, *inputs: Tensor) -> Tensor:
        total = judging.run(inputs)
        # zeros where nothing was counted: engines wait for a gradient of every parameter
        ctx.save_for_backward(*judging.gradients)
        judging.gradients = []
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(None if g is None else g * outer[0].to(g.dtype) for g in ctx.saved_tensors)
