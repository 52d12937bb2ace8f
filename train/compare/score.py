"""What heads are worth on the prompts: every budget by a walk along greedy texts, two of them really decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from heads.autoregressive import Autoregressive
from heads.base import DraftHeads
from heads.grow import Budget
from heads.target import Target
from infer.drafters import Drafter, HeadsDrafter, NoDrafter
from infer.drafters.draft_model import DraftModelDrafter
from infer.drafters.inside import inside_of
from infer.drafters.lookup import LookupDrafter
from infer.evaluate import TREE_WIDTH, Question, Settings, summary
from infer.metrics import Stats
from infer.progress import progress
from infer.walk import walk
from train.compare.kept import Figures, Kept
from train.evaluation import spread

CHAINS = (1, 2, 3, 4, 5, 6, 7)
TREES = (2, 4, 8, 16, 32, 64)
DECODED = ("chain 7", "tree 32")  # really, of 8 and of 32 rows, where nothing else is asked for
NOTHING, LOOKUP, ITSELF = "no draft", "prompt lookup", "target itself"


@dataclass(frozen=True)
class Contestant:
    """A drafter, how deep it can draft, and on how many of the prompts it is tried (None for all)."""

    drafter: Drafter
    deepest: int
    prompts: int | None = None


@dataclass(frozen=True)
class Plan:
    """How prompts are decoded.

    Attributes:
        settings: length and seed; its temperature does not count.
        temperatures: of real decoding.
        checked: on so many prompts, evenly spread, greedy decoding is real beside the walks (None for all); sampled,
            which cannot be walked, it is real on all.
        trees: rows of the trees that are of interest.
        decoded: budgets that are really decoded, by name.
    """

    settings: Settings
    temperatures: tuple[float, ...]
    checked: int | None = None
    trees: tuple[int, ...] = TREES
    decoded: tuple[str, ...] = DECODED


@dataclass(frozen=True)
class Score:
    """Figures of one contestant, one entry a prompt.

    Attributes:
        greedy: by budget ("chain 7", "tree 32"), from walks; really decoded where a drafter's cannot be walked.
        decoded: by budget and temperature ("chain 7 T=0"), really decoded; greedy ones of the checked prompts alone.
        categories: of the prompts.
    """

    greedy: dict[str, list[Stats]] = field(default_factory=dict)
    decoded: dict[str, list[Stats]] = field(default_factory=dict)
    categories: list[str] = field(default_factory=list)

    def add(self, category: str, figures: Figures) -> None:
        """One prompt's."""
        self.categories.append(category)
        for part, found in zip((self.greedy, self.decoded), figures, strict=True):
            for name, stats in found.items():
                part.setdefault(name, []).append(stats)

    def blocks(self) -> dict[str, Any]:
        """Plain figures."""
        found = {"greedy": self.greedy, "decoded": self.decoded}
        return {kind: {name: summary(each) for name, each in part.items()} for kind, part in found.items()}

    def of(self, column: str) -> list[Stats]:
        """What stands for "tree 32, T=0", one a prompt: walked where it is greedy, decoded where it is sampled."""
        budget, _, heat = column.partition(", T=")
        return self.greedy[budget] if float(heat) == 0 else self.decoded[f"{budget} T={heat}"]


def columns(temperatures: Sequence[float], decoded: Sequence[str] = DECODED) -> list[str]:
    """The figures that a comparison is about."""
    return [f"{budget}, T={heat:g}" for heat in temperatures for budget in decoded]


def of_heads(heads: DraftHeads, depth: int) -> Contestant:
    """Heads, drafting as deep as ``depth`` where they draft on their own outputs, else as deep as they were trained."""
    own = heads.config.lookahead
    return Contestant(HeadsDrafter(heads), depth if isinstance(heads, Autoregressive) else min(depth, own))


def controls(target: Target, depth: int, prompts: int) -> dict[str, Contestant]:
    """What any score is to be held against: nothing drafted, text that repeats itself, a draft that is always right."""
    itself = DraftModelDrafter(target, lookahead=depth)
    return {
        NOTHING: Contestant(NoDrafter(), 0),
        LOOKUP: Contestant(LookupDrafter(), depth),
        ITSELF: Contestant(itself, depth, prompts),
    }


def every_budget(deepest: int, trees: Sequence[int] = TREES) -> dict[str, Budget]:
    """All budgets by name, no deeper than a drafter can draft."""
    # rows that a short chain leaves are for heads that draft inside the pass, whose own rows count in a budget
    chains = {f"chain {depth}": Budget(depth + 1, min(depth, deepest)) for depth in CHAINS}
    return chains | {f"tree {rows}": Budget(rows, deepest, TREE_WIDTH) for rows in trees}


def score(
    target: Target,
    contestant: Contestant,
    questions: Sequence[Question],
    plan: Plan,
    name: str,
    kept: Kept | None = None,
) -> Score:
    """Walk along the answers, and decode them at each temperature; what ``kept`` has is not done again."""
    found, some = Score(), questions[: contestant.prompts]
    real = set(range(len(some)) if plan.checked is None else spread(len(some), plan.checked))
    for place, question in enumerate(progress(some, len(some), name)):
        checked = place in real
        key = f"{place} {int(checked)} {question.ids.tolist()}"
        figures = None if kept is None else kept.find(key)
        if figures is None:
            figures = _figures(target, contestant, question, plan, place, checked)
            if kept is not None:
                kept.add(key, figures)
        found.add(question.category, figures)
    return found


def _figures(
    target: Target, contestant: Contestant, question: Question, plan: Plan, place: int, checked: bool
) -> Figures:
    drafter, every = contestant.drafter, every_budget(contestant.deepest, plan.trees)

    def really(heat: float, budget: Budget) -> Stats:
        asked = Settings(plan.settings.max_new_tokens, heat, plan.settings.seed)
        with torch.inference_mode():
            return asked.decode(target, drafter, question, budget, place).stats

    heats = [heat for heat in plan.temperatures if heat or checked]
    if not contestant.deepest:  # every budget is the same
        greedy = dict.fromkeys(every, really(0.0, Budget.chain(0)))
        plain = {heat: really(heat, Budget.chain(0)) for heat in heats}
        return greedy, {f"{key} T={heat:g}": plain[heat] for heat in heats for key in plan.decoded}
    if inside_of(drafter) is None:
        cold = Settings(plan.settings.max_new_tokens, 0.0, plan.settings.seed)
        chain, tree = every[f"chain {max(CHAINS)}"].depth, every[f"tree {max(plan.trees)}"]
        walked = walk(target, drafter, question, cold, chain=chain, tree=tree)
        greedy = {
            key: walked.by_chain(budget.depth) if budget.width == 1 else walked.by_tree(budget.rows)
            for key, budget in every.items()
        }
    else:
        greedy = {key: really(0.0, budget) for key, budget in every.items()}
    return greedy, {f"{key} T={heat:g}": really(heat, every[key]) for heat in heats for key in plan.decoded}


def agreement(found: Score) -> Mapping[str, tuple[float, float]]:
    """Tokens per round of the walks beside those of real greedy decoding of the same prompts."""
    pairs = {}
    for key, stats in found.decoded.items():
        budget, _, heat = key.partition(" T=")
        if float(heat) == 0:
            same = found.greedy[budget][: len(stats)]
            walked, real = (Stats.pooled(each).tokens_per_round for each in (same, stats))
            pairs[budget] = (walked, real)
    return pairs
