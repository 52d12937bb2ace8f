"""What every kind of heads is: ``DraftHeads``, and the batches and reports its training speaks in.

The same module code serves the training unroll and decoding. A kind implements :meth:`DraftHeads.unroll` (what
it would draft at every position of a known text) and the :class:`~heads.grow.Grower` of a state (what it drafts
now); the loss and the growing of drafts are written once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from heads.config import HeadsConfig
from heads.draft import Draft
from heads.grow import Budget, Grower, Sampler, grow
from heads.target import Target
from heads.vocabulary import check_ids


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
        batch, row: (n,) which text, and which position's state they were drafted from.
    """

    logits: Tensor
    batch: Tensor
    row: Tensor


@dataclass
class LossReport:
    """Sums and counts, so that ratios can be formed after micro-batches and ranks are added up.

    Attributes:
        total: scalar to differentiate, a sum over rows with position weights in.
        count: scalar that ``total`` is divided by.
        terms: name → (K,) sums by draft position, unweighted by position.
        counts: (K,) rows by draft position.
        accepted: (K,) rows whose arg-max is the target's here and at all earlier positions.
        overlap: (K,) sums of Σ min(p, q), the acceptance of a sampled token (p over the whole vocabulary).
    """

    total: Tensor
    count: Tensor
    terms: dict[str, Tensor]
    counts: Tensor
    accepted: Tensor
    overlap: Tensor


class DraftHeads(nn.Module, ABC):
    """Trained heads on a frozen target.

    Args:
        config: complete settings.
        target: the target they read; not a submodule, its weights are neither trained nor saved with the heads.
    """

    default_lookahead: ClassVar[int] = 5
    target_ids: Tensor

    def __init__(self, config: HeadsConfig, target: Target) -> None:
        super().__init__()
        self.config = config
        self.__dict__["target"] = target
        size = config.draft_vocab_size
        # the map is part of the weights: -1 marks one that was never set
        self.register_buffer("target_ids", torch.full((size or 0,), -1), persistent=size is not None)

    target: Target

    @classmethod
    @abstractmethod
    def default_taps(cls, target: Target) -> tuple[int, ...]:
        """The taps to read where none are named."""

    @classmethod
    @abstractmethod
    def default_options(cls, target: Target) -> dict[str, Any]:
        """Every option of the kind with its default for a target."""

    @abstractmethod
    def initialize(self) -> None:
        """Give fresh weights their starting values, from the target where that helps."""

    @abstractmethod
    def unroll(self, batch: TrainingBatch) -> Iterator[UnrollStep]:
        """Draft at every trained position of known texts, position by position."""

    @abstractmethod
    def start(self, taps: Tensor, ids: Tensor, mask: Tensor | None = None) -> Any:
        """A decoding state after the prefill.

        Args:
            taps: (1, n, taps·H) of the prompt.
            ids: (1, n+1) the prompt and the first token that the target gave, the root.
            mask: (1, n) True where the prompt is not padding.
        """

    @abstractmethod
    def advance(self, state: Any, taps: Tensor, ids: Tensor) -> None:
        """Commit a round.

        Args:
            taps: (1, a+1, taps·H) of the pass's rows that stay: the root and the a accepted nodes.
            ids: (1, a+1) the accepted tokens and the new root.
        """

    @abstractmethod
    def grower(self, state: Any) -> Grower:
        """Answers for the next draft of a state; drops whatever an earlier draft left in it."""

    @property
    def draft_ids(self) -> Tensor | None:
        """(Vd,) target ids of the draft vocabulary, None when it is the target's."""
        return self.target_ids if self.config.draft_vocab_size is not None else None

    def set_draft_vocabulary(self, ids: Tensor) -> None:
        """Choose the tokens that can be drafted; before :meth:`initialize`, which may copy their rows."""
        if self.config.draft_vocab_size is None:
            raise ValueError("these heads draft over the whole vocabulary: set draft_vocab_size to reduce it")
        checked = check_ids(ids, self.config.draft_vocab_size, self.config.vocab_size)
        self.target_ids = checked.to(self.target_ids.device)

    def propose(self, state: Any, budget: Budget, sampler: Sampler | None = None) -> Draft:
        """Draft within a budget; tokens of a chain are drawn when there is a sampler, else the likeliest."""
        with torch.no_grad():
            return grow(self.grower(state), budget, sampler, self.draft_ids)

    def position_weights(self) -> list[float]:
        """Weight of each draft position's loss."""
        decay = float(self.config.options.get("position_decay", 1.0))
        return [decay**j for j in range(self.config.lookahead)]

    def loss(self, batch: TrainingBatch, criterion: Criterion) -> LossReport:
        """Loss and acceptance over every trained position of a batch.

        The token drafted from state i at position j is ``i + 2 + j``, judged by the target's distribution at
        ``i + 1 + j`` (drafters.md, "Training-time test"); a row counts where that token is one the target says.
        """
        terms: dict[str, list[Tensor]] = {}
        counts, accepted, overlap = [], [], []
        total = batch.taps.new_zeros((), dtype=torch.float32)
        alive: Tensor | None = None
        teacher = _TeacherRows(self, batch)
        for j, (step, weight) in enumerate(zip(self.unroll(batch), self.position_weights(), strict=True)):
            counted = teacher.counted(step, j)
            logits, word, top = step.logits[counted], *teacher.at(step, j, counted)
            values = criterion(logits, word)
            for name, value in values.items():
                terms.setdefault(name, []).append(value.detach().sum())
                total = total + weight * value.sum()
            with torch.no_grad():
                hit = self._to_target(logits.argmax(-1)) == top
                joint = torch.zeros_like(counted)
                joint[counted] = hit
                alive = joint if alive is None else joint & alive[: joint.shape[0]]
                counts.append(counted.sum())
                accepted.append(alive.sum())
                shared = torch.minimum(logits.float().softmax(-1), (word.logits.float() - word.lse[:, None]).exp())
                overlap.append(shared.sum())
        count = torch.stack(counts)
        return LossReport(
            total=total,
            count=count[0].float(),
            terms={name: torch.stack(value) for name, value in terms.items()},
            counts=count,
            accepted=torch.stack(accepted),
            overlap=torch.stack(overlap),
        )

    def _to_target(self, indices: Tensor) -> Tensor:
        return indices if self.draft_ids is None else self.draft_ids[indices]

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and heads.safetensors into ``folder``, whole or not at all."""
        from heads.store import save

        save(self, folder)

    @classmethod
    def from_pretrained(cls, path_or_repo: str | Path, target: Any = None, **options: Any) -> Self:
        """Load heads of any kind; see :func:`heads.store.load`."""
        from heads.store import load

        return load(path_or_repo, target, **options)  # type: ignore[return-value]

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload to the Hugging Face Hub; see :func:`heads.hub.push`."""
        from heads.hub import push

        return push(self, repo_id, **options)


class _TeacherRows:
    """The target's logits at the positions a batch is judged by, computed once for all draft positions."""

    def __init__(self, heads: DraftHeads, batch: TrainingBatch) -> None:
        self.batch, self.length = batch, batch.ids.shape[1]
        says = torch.zeros_like(batch.loss_mask)
        says[:, :-1] = batch.loss_mask[:, 1:]  # position t is judged when token t+1 is the target's own
        self.place = torch.full(says.shape, -1, device=says.device)
        self.place[says] = torch.arange(int(says.sum()), device=says.device)
        with torch.no_grad():
            hidden = batch.hidden[says].to(heads.target.dtype)
            self.logits = heads.target.project_rows(hidden, heads.draft_ids)
        self.lse, self.top = batch.lse[says], batch.top[says]

    def _judge(self, step: UnrollStep, j: int) -> Tensor:
        at = step.row + 1 + j
        return torch.where(at < self.length, self.place[step.batch, at.clamp(max=self.length - 1)], -1)

    def counted(self, step: UnrollStep, j: int) -> Tensor:
        """Bool (n,): rows whose drafted token is one the target says."""
        return self._judge(step, j) >= 0

    def at(self, step: UnrollStep, j: int, counted: Tensor) -> tuple[Teacher, Tensor]:
        """The teacher and the target's arg-max (m,) for the counted rows."""
        rows = self._judge(step, j)[counted]
        return Teacher(self.logits[rows], self.lse[rows]), self.top[rows]
