"""A held-out evaluation: the training loss without gradients, and real decoding beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heads.judge import TrainingBatch
from train.batches import split_step
from train.config import EvalConfig, RunConfig
from train.conversations import Conversations
from train.decode_eval import Decoded, decode_prompts, disagreement
from train.engine import Engine
from train.features import FeatureSource
from train.figures import Figures, Sums
from train.interrupt import StopRequest
from train.ranks import Ranks


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation found; a part that the settings leave out is None."""

    taught: Figures | None
    decoded: Decoded | None
    warning: str | None

    @property
    def score(self) -> float:
        """By what the best checkpoint is chosen: decoded tokens per round; without decoding, the estimate of them."""
        if self.decoded is not None:
            return self.decoded.tokens_per_round
        return self.taught.tokens_per_round if self.taught is not None else 0.0

    def lines(self) -> list[str]:
        """For people."""
        lines = []
        if self.taught is not None:
            accepted = " ".join(f"{value:.3f}" for value in self.taught.acceptance)
            lines.append(f"held-out  loss {self.taught.loss:.4f}  accepted {accepted}  ({self.taught.rows} rows)")
        if self.decoded is not None:
            accepted = " ".join(f"{value:.3f}" for value in self.decoded.acceptance)
            lines.append(
                f"decoded   {self.decoded.tokens_per_round:.3f} tokens per round, loop-free "
                f"{self.decoded.loop_free:.3f}  accepted {accepted}  ({self.decoded.rounds} rounds)"
            )
        return [*lines, f"warning: {self.warning}"] if self.warning else lines

    def flat(self) -> dict[str, float]:
        """For trackers."""
        values = self.taught.flat("heldout") if self.taught is not None else {}
        return values | (self.decoded.flat() if self.decoded is not None else {})

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "heldout": self.taught.flat("heldout") if self.taught is not None else None,
            "decoded": self.decoded.to_dict() if self.decoded is not None else None,
            "warning": self.warning,
        }


def evaluate(
    config: RunConfig,
    engine: Engine,
    source: FeatureSource,
    batch: Callable[[FeatureSource, tuple[int, ...]], TrainingBatch],
    stop: StopRequest,
) -> Evaluation:
    """Evaluate on all processes; each conversation and each prompt counts exactly once.

    Raises:
        ValueError: decoding is wanted, but no held-out conversation has a prompt.
    """
    ranks, settings = Ranks(engine.accelerator), config.eval
    conversations = source.conversations
    taught = decoded = None
    if settings.conversations:
        chosen = spread(len(conversations), settings.conversations)
        step = engine.step.eval()
        sums = Sums()
        train = config.train
        shares = split_step(chosen, conversations.lengths, train.micro_tokens, ranks.count, packing=train.packing)
        mine = shares[ranks.index]
        source.expect([micro.indices for micro in mine])
        with torch.no_grad():
            for micro in mine:
                _, report = step(partial(batch, source, micro.indices))
                sums.add(report, counts=micro.counts)
        taught = sums.figures(ranks)
    if settings.prompts:
        decoded = decode_prompts(
            engine.whole_heads(),
            _prompts(conversations, settings),
            ranks,
            tokens=settings.tokens,
            lookahead=settings.lookahead,
            stop=lambda: bool(stop.number),
        )
    warning = disagreement(taught, decoded) if taught is not None and decoded is not None else None
    return Evaluation(taught, decoded, warning)


def _prompts(conversations: Conversations, settings: EvalConfig) -> list[Tensor]:
    every = (conversations.prompt(i) for i in spread(len(conversations), settings.prompts))
    prompts = [prompt for prompt in every if len(prompt)]
    if not prompts:
        raise ValueError(f"{conversations.where}: no conversation has a prompt to decode; set eval.prompts to 0")
    return prompts


def evaluated(conversations: Conversations, settings: EvalConfig) -> Conversations:
    """Those of the held-out conversations that evaluations look at: no others' states are computed.

    Raises:
        ValueError: as :func:`evaluate`, before there is anything to evaluate.
    """
    wanted = spread(len(conversations), max(settings.conversations, settings.prompts))
    chosen = conversations if len(wanted) == len(conversations) else conversations.select(wanted)
    if settings.prompts:
        _prompts(chosen, settings)
    return chosen


def spread(there: int, wanted: int) -> list[int]:
    """``wanted`` numbers below ``there``, evenly spaced; all of them when there are no more."""
    return np.unique(np.linspace(0, there - 1, min(wanted, there)).round().astype(int)).tolist()
