"""What every kind of heads is: ``DraftHeads``, and the batches and reports its training speaks in.

The same module code serves the training unroll and decoding. A kind implements :meth:`DraftHeads.unroll` (what
it would draft at every position of a known text) and the :class:`~heads.grow.Grower` of a state (what it drafts
now); the loss and the growing of drafts are written once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from heads.chunked import judge
from heads.config import HeadsConfig
from heads.draft import Draft
from heads.grow import Budget, Grower, Sampler, grow
from heads.judge import Criterion, TeacherRows, TrainingBatch, UnrollStep
from heads.target import Target
from heads.vocabulary import check_ids


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
    later_options: ClassVar[dict[str, Any]] = {}  # not in older folders: the values that such heads were trained with
    starting: ClassVar[tuple[str, ...]] = ()
    """Options that only fresh weights hang on: trained ones have forgotten them."""
    attentions: ClassVar[tuple[str, ...]] = ("plain",)
    """Ways in which the training unroll can attend; ``attention`` is the one it does."""
    attention: str = "plain"
    over_vocabulary: ClassVar[tuple[str, ...]] = ("lm_head", "outputs", "markov")
    """Submodules whose matrices have a row for each token, which optimizers of other matrices leave alone."""
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
    def default_taps(cls, target: Target) -> tuple[int, ...]:
        """The taps to read where none are named: here the last hidden state, after the final norm, which the target's
        output matrix reads."""
        return (target.num_layers,)

    @classmethod
    @abstractmethod
    def default_options(cls, target: Target) -> dict[str, Any]:
        """Every option of the kind with its default for a target."""

    def passes(self, depth: int) -> int:
        """How often their layers run, one run waiting for the other, to draft a chain of ``depth`` tokens."""
        return depth

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

    def count(self, loss_mask: Tensor) -> Tensor:
        """What ``LossReport.count`` of a batch with this loss mask (B, T) is: known before the forward pass, so
        that a step over several micro-batches and processes can be divided by the sum of its counts."""
        return loss_mask[:, 2:].sum()

    def loss(
        self,
        batch: TrainingBatch,
        criterion: Criterion,
        *,
        measure: bool = True,
        weights: Sequence[float] | None = None,
    ) -> LossReport:
        """Loss and acceptance over every trained position of a batch.

        The token drafted from state i at position j is ``i + 2 + j``, judged by the target's distribution at
        ``i + 1 + j`` (EAGLE-3's training-time test); a row counts where that token is one the target says.

        Args:
            criterion: what is minimized.
            measure: also fill ``accepted`` and ``overlap`` (two more passes over the vocabulary); zeros otherwise.
            weights: of each draft position; :meth:`position_weights` for None.
        """
        return self.report(list(self.unroll(batch)), batch, criterion, measure=measure, weights=weights)

    def report(
        self,
        steps: Sequence[UnrollStep],
        batch: TrainingBatch,
        criterion: Criterion,
        *,
        measure: bool = True,
        weights: Sequence[float] | None = None,
    ) -> LossReport:
        """What :meth:`loss` makes of an unroll of the batch."""
        total, judged = judge(
            steps,
            TeacherRows(self.target, batch, self.draft_ids),
            criterion,
            self.position_weights() if weights is None else weights,
            measure=measure,
            confidence_weight=float(self.config.options.get("confidence_weight", 1.0)),
        )
        alive = judged[0].hit.new_ones(judged[0].hit.shape)
        accepted = []
        for position in judged:
            alive = alive & position.hit
            accepted.append(alive.sum())
        counts = torch.stack([position.count for position in judged])
        return LossReport(
            total=total,
            count=counts[0].float(),
            terms={name: torch.stack([position.terms[name] for position in judged]) for name in judged[0].terms},
            counts=counts,
            accepted=torch.stack(accepted),
            overlap=torch.stack([position.overlap.sum() for position in judged]),
        )

    def save_pretrained(self, folder: str | Path, *, bundle: bool = False, tokenizer: Any = None) -> None:
        """Write config.json and heads.safetensors into ``folder``, whole or not at all.

        With ``bundle`` the target and its tokenizer go along, into a new folder; see :func:`heads.bundle.save_bundle`.
        """
        if bundle:
            from heads.bundle import save_bundle

            save_bundle(self, folder, tokenizer=tokenizer)
        else:
            from heads.store import save

            save(self, folder)

    @classmethod
    def from_pretrained(cls, path_or_repo: str | Path, target: Any = None, **options: Any) -> Self:
        """Load heads of any kind; see :func:`heads.store.load`."""
        from heads.store import load

        return load(path_or_repo, target, **options)  # type: ignore[return-value]

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload to the Hugging Face Hub; see :func:`heads.push.push`."""
        from heads.push import push

        return push(self, repo_id, **options)
