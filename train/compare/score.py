"""What heads are worth on the prompts: every budget by a walk along greedy texts, two of them really decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from heads.autoregressive import Autoregressive
from heads.base import DraftHeads
from heads.grow import Budget
from heads.target import Target
from infer.drafters import Drafter, HeadsDrafter
from infer.drafters.draft_model import DraftModelDrafter
from infer.drafters.inside import inside_of
from infer.drafters.lookup import LookupDrafter
from infer.evaluate import TREE_WIDTH, Question, Settings, summary
from infer.metrics import Stats
from infer.progress import progress
from infer.walk import walk

CHAINS = (1, 2, 3, 4, 5, 6, 7)
TREES = (2, 4, 8, 16, 32, 64)
DECODED = ("chain 7", "tree 32")  # really, of 8 and of 32 rows
LOOKUP, ITSELF = "prompt lookup", "target itself"


@dataclass(frozen=True)
class Contestant:
    """A drafter, how deep it can draft, and on how many of the prompts it is tried (None for all)."""

    drafter: Drafter
    deepest: int
    prompts: int | None = None


@dataclass(frozen=True)
class Score:
    """Figures of one contestant, one entry a prompt.

    Attributes:
        greedy: by budget ("chain 7", "tree 32"), from walks; really decoded where a drafter's cannot be walked.
        decoded: by budget and temperature ("chain 7 T=0"), really decoded.
    """

    greedy: dict[str, list[Stats]]
    decoded: dict[str, list[Stats]]

    def blocks(self) -> dict[str, Any]:
        """Plain figures."""
        found = {"greedy": self.greedy, "decoded": self.decoded}
        return {kind: {name: summary(each) for name, each in part.items()} for kind, part in found.items()}


def of_heads(heads: DraftHeads, depth: int) -> Contestant:
    """Heads, drafting as deep as ``depth`` where they draft on their own outputs, else as deep as they were trained."""
    own = heads.config.lookahead
    return Contestant(HeadsDrafter(heads), depth if isinstance(heads, Autoregressive) else min(depth, own))


def controls(target: Target, depth: int, prompts: int) -> dict[str, Contestant]:
    """What any score is to be held against: text that repeats itself, and a draft that is always right."""
    itself = DraftModelDrafter(target, lookahead=depth)
    return {LOOKUP: Contestant(LookupDrafter(), depth), ITSELF: Contestant(itself, depth, prompts)}


def every_budget(deepest: int) -> dict[str, Budget]:
    """All budgets by name, no deeper than a drafter can draft."""
    chains = {f"chain {depth}": Budget.chain(min(depth, deepest)) for depth in CHAINS}
    return chains | {f"tree {rows}": Budget(rows, deepest, TREE_WIDTH) for rows in TREES}


def score(
    target: Target,
    contestant: Contestant,
    questions: Sequence[Question],
    settings: Settings,
    temperatures: Sequence[float],
    name: str,
) -> Score:
    """Walk along the answers, and decode them at each temperature.

    Args:
        settings: length and seed; its temperature does not count.
    """
    drafter, deepest, some = contestant.drafter, contestant.deepest, questions[: contestant.prompts]
    cold = Settings(settings.max_new_tokens, 0.0, settings.seed)
    every = every_budget(deepest)
    greedy: dict[str, list[Stats]] = {key: [] for key in every}
    keys = [(key, heat) for heat in temperatures for key in DECODED]
    decoded: dict[str, list[Stats]] = {f"{key} T={heat:g}": [] for key, heat in keys}

    def really(asked: Settings, key: str, question: Question, place: int) -> Stats:
        with torch.inference_mode():
            return asked.decode(target, drafter, question, every[key], place).stats

    for place, question in enumerate(progress(some, len(some), name)):
        if inside_of(drafter) is None:
            chain, tree = every[f"chain {max(CHAINS)}"].depth, every[f"tree {max(TREES)}"]
            walked = walk(target, drafter, question, cold, chain=chain, tree=tree)
            for key, budget in every.items():
                found = walked.by_chain(budget.depth) if budget.width == 1 else walked.by_tree(budget.rows)
                greedy[key].append(found)
        else:
            for key in every:
                greedy[key].append(really(cold, key, question, place))
        for key, heat in keys:
            asked = Settings(settings.max_new_tokens, heat, settings.seed)
            decoded[f"{key} T={heat:g}"].append(really(asked, key, question, place))
    return Score(greedy, decoded)


def agreement(found: Score) -> Mapping[str, tuple[float, float]]:
    """Tokens per round of the walks beside those of real greedy decoding, for each budget that was really decoded."""
    pairs = {}
    for key, stats in found.decoded.items():
        budget, _, heat = key.partition(" T=")
        if float(heat) == 0:
            walked, real = (Stats.pooled(each).tokens_per_round for each in (found.greedy[budget], stats))
            pairs[budget] = (walked, real)
    return pairs
