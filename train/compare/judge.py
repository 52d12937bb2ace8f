"""Decodes with one contestant after another, always in the same way, and keeps what it found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from heads.base import DraftHeads
from heads.store import weights_digest
from heads.target import Target
from infer.evaluate import Question
from infer.metrics import pooled
from train.compare.kept import Kept
from train.compare.price import price
from train.compare.score import DECODED, Contestant, Plan, Score, of_heads, score


class Judge:
    """One target, one way to decode.

    Args:
        folder: for the figures of prompts that are done, so that a comparison that was stopped goes on.
        depth: of the deepest draft.
    """

    def __init__(self, target: Target, folder: Path, depth: int, plan: Plan) -> None:
        self.target, self.folder, self.depth, self.plan = target, folder, depth, plan

    def score(
        self, name: str, one: Contestant, questions: Sequence[Question], of: Mapping[str, Any], plan: Plan | None = None
    ) -> Score:
        """Figures of a contestant; ``of`` tells it from all others."""
        plan = plan or self.plan
        about = {
            "target": self.target.identity().weights,
            "dtype": str(self.target.dtype),
            "depth": self.depth,
            "heats": plan.temperatures,
            "trees": plan.trees,
            "decoded": plan.decoded,
            "new": plan.settings.max_new_tokens,
            "seed": plan.settings.seed,
            **of,
        }
        return score(self.target, one, questions, plan, name, Kept(self.folder, name, about))

    def of_heads(self, name: str, folder: Path, questions: Sequence[Question], plan: Plan | None = None) -> Score:
        """Figures of heads in a folder."""
        heads = DraftHeads.from_pretrained(folder, self.target)
        of = {"heads": weights_digest(folder), "config": heads.config.to_dict()}
        return self.score(name, of_heads(heads, self.depth), questions, of, plan)

    def price(self, folder: Path, question: Question, decoded: Sequence[str]) -> dict[str, Any]:
        """What heads in a folder cost beside the target, behind a prompt; timed, so nothing is kept."""
        heads = DraftHeads.from_pretrained(folder, self.target).eval()
        with torch.inference_mode():
            return price(self.target, heads, of_heads(heads, self.depth).deepest, question.ids, decoded)

    def worth(self, name: str, folder: Path, questions: Sequence[Question]) -> float:
        """Accepted drafts a round of heads, greedy, the mean of a chain's and a tree's."""
        found = self.of_heads(name, folder, questions, Plan(self.plan.settings, ()))
        each = [pooled(found.greedy[budget], without_loops=True).value - 1 for budget in DECODED]
        return sum(each) / len(each)
