"""Heads whose drafts, and a target whose words, are given: for judging them by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from heads.base import DraftHeads
from heads.config import HeadsConfig
from heads.identity import TargetIdentity
from heads.judge import Output, TrainingBatch, UnrollStep
from heads.target import Target

NOBODY = TargetIdentity("nobody", None, {}, "")


class Table:
    """A target whose hidden states are its logits."""

    dtype = torch.float64

    def __init__(self, vocab: int) -> None:
        self.vocab_size = vocab

    def project_rows(self, hidden: Tensor, ids: Tensor | None) -> Tensor:
        return hidden if ids is None else hidden[..., ids]


class Scripted(DraftHeads):
    """Heads that draft given logits (K, B, T, Vd) at every row with a trained token two places on."""

    def __init__(self, logits: Tensor, vocab: int, ids: Tensor | None = None, decay: float = 1.0) -> None:
        size = None if ids is None else len(ids)
        config = HeadsConfig("scripted", len(logits), (0,), NOBODY, vocab, vocab, size, {"position_decay": decay})
        super().__init__(config, Table(vocab))  # type: ignore[arg-type]
        if ids is not None:
            self.set_draft_vocabulary(ids)
        self.table = torch.nn.Parameter(logits)

    def unroll(self, batch: TrainingBatch) -> Iterator[UnrollStep]:
        where, row = batch.loss_mask[:, 2:].nonzero(as_tuple=True)
        for logits in self.table:
            yield UnrollStep(logits[where, row], Output(lambda states, _: states), where, row)

    @classmethod
    def default_taps(cls, target: Target) -> tuple[int, ...]:
        raise NotImplementedError

    @classmethod
    def default_options(cls, target: Target) -> dict[str, Any]:
        raise NotImplementedError

    def initialize(self) -> None:
        raise NotImplementedError

    def start(self, taps: Tensor, ids: Tensor, mask: Tensor | None = None) -> Any:
        raise NotImplementedError

    def advance(self, state: Any, taps: Tensor, ids: Tensor) -> None:
        raise NotImplementedError

    def grower(self, state: Any) -> Any:
        raise NotImplementedError


def batch_from(logits: Tensor, loss_mask: Tensor) -> TrainingBatch:
    """A batch whose target says ``logits`` (B, T, V)."""
    return TrainingBatch(
        ids=torch.zeros(logits.shape[:2], dtype=torch.long),
        loss_mask=loss_mask,
        mask=torch.ones_like(loss_mask),
        taps=logits,
        hidden=logits,
        top=logits.argmax(-1),
        lse=logits.logsumexp(-1),
    )
