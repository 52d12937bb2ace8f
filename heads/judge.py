"""How drafted distributions are judged in training: rows, the target's word on them, and what a step is made of.

``heads/chunked.py`` takes loss and gradient of these, some rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from heads.target import Target


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
        documents: (B, T) int64 where rows hold several texts: 1, 2, … by text, 0 for padding; None where each row
            is one text. The first two tokens of a text have no loss mark then: no state before them drafts them.
    """

    ids: Tensor
    loss_mask: Tensor
    mask: Tensor
    taps: Tensor
    hidden: Tensor
    top: Tensor
    lse: Tensor
    documents: Tensor | None = None

    def to(self, device: torch.device | str) -> TrainingBatch:
        """The batch on another device."""
        return replace(self, **{name: value.to(device) for name, value in vars(self).items() if value is not None})

    @property
    def positions(self) -> Tensor:
        """Positions (B, T), or (1, T) where all rows have the same: each text's own, from 0."""
        if self.documents is None:
            return torch.arange(self.ids.shape[1], device=self.ids.device)[None]
        return text_positions(self.documents)

    @property
    def texts(self) -> Tensor:
        """(B, T) numbers of texts, each its own in the whole batch; of padding, whatever is not a text's."""
        rows = torch.arange(len(self.ids), device=self.ids.device)[:, None]
        if self.documents is None:
            return rows.expand(self.ids.shape)
        return self.documents + rows * (self.documents.max() + 1)

    def same_text(self, rows: Tensor) -> Tensor:
        """Bool (B, R, T), or (1, 1, 1): whether column t is of the same text as row number ``rows`` (B, R)."""
        if self.documents is None:
            return torch.ones(1, 1, 1, dtype=torch.bool, device=rows.device)
        return self.documents.gather(1, rows)[:, :, None] == self.documents[:, None]


def text_positions(documents: Tensor) -> Tensor:
    """Positions (B, T) of tokens in their texts, from 0, of the texts' numbers (B, T)."""
    places = torch.arange(documents.shape[1], device=documents.device)[None]
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - torch.where(begins, places, 0).cummax(1).values


@dataclass
class Teacher:
    """The target's word on n positions.

    Attributes:
        logits: (n, Vd) over the draft vocabulary.
        lse: (n,) log-sum-exp over the whole vocabulary.
        label: (n,) place in the draft vocabulary of the token that the text goes on with, -1 where it has none.
    """

    logits: Tensor
    lse: Tensor
    label: Tensor | None = None


Criterion = Callable[[Tensor, Teacher], dict[str, Tensor]]
"""Draft logits (n, Vd) and the teacher's → named loss terms (n,), already weighted; their sum is minimized."""


@dataclass(frozen=True)
class Output:
    """How draft logits are made of states: asked for some rows at a time, so that there are never all at once.

    Attributes:
        project: states (m, H) and their numbers (m,) among the step's rows → draft logits (m, Vd).
        modules: those whose trained weights it uses; what is not of them gets no gradient through it.
    """

    project: Callable[[Tensor, Tensor], Tensor]
    modules: tuple[nn.Module, ...] = ()

    def weights(self) -> list[nn.Parameter]:
        """Its trained parameters; taken by name, which is how sharding engines see that they are needed."""
        names = ((module, name) for module in self.modules for name, p in module.named_parameters() if p.requires_grad)
        return [module.get_parameter(name) for module, name in names]


@dataclass
class UnrollStep:
    """One draft position j of a training unroll.

    Attributes:
        states: (n, H) that the logits of the token at ``row + 2 + j`` are made of.
        output: makes them.
        batch, row: (n,) which text, and which position's state they were drafted from; the same for every j.
        confidence: (n,) logits of the chance that the tokens are accepted, where heads tell one.
        terms: named loss terms (n,) of the kind's own, already weighted; those of rows without a teacher do not count.
    """

    states: Tensor
    output: Output
    batch: Tensor
    row: Tensor
    confidence: Tensor | None = None
    terms: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def logits(self) -> Tensor:
        """All (n, Vd) at once: for looking at, too large to train with."""
        return self.output.project(self.states, torch.arange(len(self.row), device=self.row.device))


class TeacherRows:
    """The positions that a batch is judged by, and the target's word on a part of them at a time."""

    def __init__(self, target: Target, batch: TrainingBatch, draft_ids: Tensor | None) -> None:
        self.target, self.draft_ids, self.documents = target, draft_ids, batch.documents
        self.length = batch.ids.shape[1]
        says = torch.zeros_like(batch.loss_mask)
        says[:, :-1] = batch.loss_mask[:, 1:]  # position t is judged when token t + 1 is the target's own
        self.place = torch.full(says.shape, -1, device=says.device)
        self.place[says] = torch.arange(int(says.sum()), device=says.device)
        self.hidden = batch.hidden[says]
        self.lse, self.top = batch.lse[says], batch.top[says]
        self.label = self._place(batch.ids.roll(-1, 1)[says])

    def __len__(self) -> int:
        return len(self.top)

    @property
    def width(self) -> int:
        """Vd, entries of the draft vocabulary."""
        return self.target.vocab_size if self.draft_ids is None else len(self.draft_ids)

    def rows(self, step: UnrollStep, j: int) -> Tensor:
        """For each row of a step the number (n,) of the position that judges it, -1 where none does."""
        at = step.row + 1 + j
        found = self.place[step.batch, at.clamp(max=self.length - 1)]
        there = at < self.length - 1
        if self.documents is not None:  # what is drafted must be of the text that it was drafted from
            drafted = self.documents[step.batch, (at + 1).clamp(max=self.length - 1)]
            there &= drafted == self.documents[step.batch, step.row]
        return torch.where(there, found, -1)

    @torch.no_grad()
    def logits(self, part: slice) -> Tensor:
        """The target's logits (m, Vd) at a part of the positions."""
        return self.target.project_rows(self.hidden[part].to(self.target.dtype), self.draft_ids)

    def word(self, logits: Tensor, rows: Tensor) -> Teacher:
        """What the criterion is told of rows (m,), whose logits (m, Vd) are given."""
        return Teacher(logits, self.lse[rows], self.label[rows])

    def _place(self, said: Tensor) -> Tensor:
        """Places (n,) in the draft vocabulary of token ids (n,), -1 where they have none."""
        if self.draft_ids is None:
            return said
        place = torch.searchsorted(self.draft_ids, said).clamp(max=len(self.draft_ids) - 1)
        return torch.where(self.draft_ids[place] == said, place, -1)
