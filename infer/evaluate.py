"""What a drafter's proposals are worth: acceptance by position, tokens per round, by task, chains beside trees.

Figures here come from real decoding and hold on any machine; seconds are :mod:`infer.bench`'s business.
Conventions are those of :mod:`infer.metrics`: counts are pooled over prompts before ratios are formed, intervals are
95% bootstrap intervals over prompts, and every τ stands also without the rounds that lie in loops of the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heads.grow import Budget
from heads.target import Target
from infer.along import along
from infer.along import lines as lines_along
from infer.drafters import Drafter
from infer.generate import Generation, generate
from infer.lookahead import Acceptance, Shape, expected_tokens, static_tree
from infer.metrics import Stats, conditional_acceptance, joint_acceptance, loop_free, pooled
from infer.progress import progress
from infer.prompts import Prompt
from infer.watch import RankCounts, Watched

TREE_ROWS = (16, 32)
TREE_WIDTH = 8


@dataclass(frozen=True)
class Question:
    """A prompt as token ids (1, n), with what to report it under."""

    id: str
    category: str
    ids: Tensor


@dataclass(frozen=True)
class Settings:
    """How prompts are decoded: greedily at temperature 0, else sampled with ``seed`` + the prompt's place."""

    max_new_tokens: int = 96
    temperature: float = 0.0
    seed: int = 0

    def decode(self, target: Target, drafter: Drafter, question: Question, budget: Budget, place: int) -> Generation:
        """One prompt under one budget."""
        sampling = (
            {"do_sample": False} if not self.temperature else {"do_sample": True, "temperature": self.temperature}
        )
        return generate(
            target,
            question.ids,
            draft=drafter,
            budget=budget,
            seed=self.seed + place,
            max_new_tokens=self.max_new_tokens,
            **sampling,
        )


def ask(prompts: Sequence[Prompt], tokenizer: Any) -> list[Question]:
    """Encode prompts with the target's chat template."""
    return [Question(prompt.id, prompt.category, prompt.encode(tokenizer)) for prompt in prompts]


def probe_shape(depth: int, ranks: int = 8, spread: int = 2) -> Shape:
    """The tree whose rounds measure rank acceptance: all paths whose ranks add up to ``spread`` at most.

    The root has children up to ``ranks``; depth 5 makes 60 nodes. No node is left out for looking unlikely, so
    the counts are not biased towards confident places.
    """
    paths: list[tuple[int, ...]] = [()]
    shape: list[tuple[int, ...]] = [(rank,) for rank in range(spread + 1, ranks)]
    for _ in range(depth):
        paths = [(*path, rank) for path in paths for rank in range(spread + 1 - sum(path))]
        shape += paths
    return tuple(sorted(shape, key=lambda path: (len(path), path)))


def measure_acceptance(
    target: Target,
    drafter: Drafter,
    questions: Sequence[Question],
    settings: Settings,
    *,
    depth: int | None = None,
    dynamic: Sequence[Budget] = (),
    chain: bool = True,
) -> Acceptance:
    """Decode ``questions`` to learn what drafts are worth: a chain, a probing tree, and trees by confidence.

    Args:
        depth: how deep to draft; the drafter's look-ahead by default.
        dynamic: budgets of trees by confidence to try.
        chain: also measure the chain.
    """
    depth = drafter.lookahead if depth is None else depth
    if depth == 0:
        return Acceptance()
    watched = Watched(drafter)
    counts = RankCounts()
    chains: list[Stats] = []
    trees: dict[Budget, list[Stats]] = {budget: [] for budget in dynamic}
    probe = Budget.static(probe_shape(depth))
    for place, question in enumerate(progress(questions, len(questions), "measuring acceptance")):
        out = settings.decode(target, watched, question, probe, place)
        counts.add(watched.ranks(out.sequences[0].tolist()))
        if chain:
            chains.append(settings.decode(target, drafter, question, Budget.chain(depth), place).stats)
        for budget, stats in trees.items():
            stats.append(settings.decode(target, drafter, question, budget, place).stats)
    return Acceptance(
        joint=tuple(joint_acceptance([r for stats in chains for r in stats.log])),
        ranks=counts.acceptance(),
        dynamic={(b.rows, b.depth, b.width): pooled(stats).value for b, stats in trees.items()},
    )


def default_budgets(
    lookahead: int, ranks: Sequence[Sequence[float]] = (), rows: Sequence[int] = TREE_ROWS
) -> dict[str, Budget]:
    """A chain, and for each of ``rows`` a tree by confidence and the static tree that ``ranks`` asks for."""
    budgets = {f"chain {lookahead}": Budget.chain(lookahead)}
    for count in rows:
        budgets[f"dynamic tree {count}"] = Budget(rows=count, depth=lookahead, width=TREE_WIDTH)
        shape = static_tree(ranks, count)
        if shape:
            budgets[f"static tree {count}"] = Budget.static(shape)
    return budgets


@torch.inference_mode()
def evaluate(
    target: Target,
    drafter: Drafter,
    questions: Sequence[Question],
    budgets: Mapping[str, Budget],
    settings: Settings = Settings(),
    *,
    ranks: Sequence[Sequence[float]] = (),
) -> dict[str, Any]:
    """Decode every question under every budget.

    Args:
        target: the target.
        drafter: what drafts.
        questions: prompts, held out.
        budgets: name -> how much a round may draft.
        settings: length, temperature, seed.
        ranks: rank acceptance from *other* prompts; static trees are then reported beside what it predicts.

    Returns:
        A report of plain values: ``settings``, and under ``budgets`` a block a name (see :func:`summary`) with
        ``by_category``.

    Raises:
        ValueError: no questions.
    """
    if not questions:
        raise ValueError("there is nothing to evaluate on: no prompts were given")
    logs: dict[str, list[Stats]] = {name: [] for name in budgets}
    for place, question in enumerate(progress(questions, len(questions), "evaluating")):
        for name, budget in budgets.items():
            logs[name].append(settings.decode(target, drafter, question, budget, place).stats)
    blocks = {}
    for name, budget in budgets.items():
        block = {"rows": budget.rows, "depth": budget.depth, "width": budget.width} | summary(logs[name])
        if budget.shape is not None:
            block["shape"] = [list(path) for path in budget.shape]
            if ranks:
                block["expected_tokens_per_round"] = expected_tokens(budget.shape, ranks)
        block["by_category"] = {
            category: summary([s for s, q in zip(logs[name], questions, strict=True) if q.category == category])
            for category in dict.fromkeys(q.category for q in questions)
        }
        blocks[name] = block
    return {
        "target": target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "settings": {
            "prompts": len(questions),
            "max_new_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "seed": settings.seed,
        },
        "rank_acceptance": [list(row) for row in ranks],
        "budgets": blocks,
    }


def summary(stats: Sequence[Stats]) -> dict[str, Any]:
    """Pooled figures of several outputs.

    ``tokens_per_round`` and ``loop_free_tokens_per_round`` are {value, low, high}; ``accepted_per_position`` is joint,
    ``conditional_per_position`` given that the position was reached, both over all rounds;
    ``loop_free_accepted_per_position`` is joint without looped rounds; ``by_output_position`` is :func:`along`'s.
    """
    log = [r for s in stats for r in s.log]
    free = loop_free(stats)
    proposed = sum(r.proposed for r in log)
    return {
        "prompts": len(stats),
        "tokens": sum(s.tokens for s in stats),
        "rounds": len(log),
        "proposed": proposed,
        "accepted": sum(r.accepted for r in log),
        "acceptance_rate": sum(r.accepted for r in log) / proposed if proposed else 0.0,
        "tokens_per_round": pooled(stats)._asdict(),
        "loop_free_tokens_per_round": pooled(stats, without_loops=True)._asdict(),
        "looped_rounds": len(log) - len(free),
        "accepted_per_position": joint_acceptance(log),
        "loop_free_accepted_per_position": joint_acceptance(free),
        "conditional_per_position": conditional_acceptance(log),
        "by_output_position": along(stats),
    }


def table(report: Mapping[str, Any]) -> str:
    """The report for people."""
    settings = report["settings"]
    lines = [
        f"{report['target']} ({report['dtype']}), {settings['prompts']} prompts, "
        f"up to {settings['max_new_tokens']} new tokens, temperature {settings['temperature']:g}",
        "τ: tokens per round, bonus included, the prefill's token not [95% over prompts]; loop-free: without loops",
        "",
        f"{'draft':<20}{'rows':>5}  {'τ loop-free':<22}{'τ':<22}{'rate':>5}  accepted by position (joint)",
    ]
    for name, block in report["budgets"].items():
        positions = " ".join(f"{value:.2f}" for value in block["accepted_per_position"])
        lines.append(
            f"{name:<20}{block['rows']:>5}  {_interval(block['loop_free_tokens_per_round']):<22}"
            f"{_interval(block['tokens_per_round']):<22}{block['acceptance_rate']:>5.2f}  {positions}"
        )
    categories = next(iter(report["budgets"].values()))["by_category"]
    if len(categories) > 1:
        names = list(report["budgets"])
        lines += ["", f"{'τ loop-free by category':<26}{'prompts':>8}" + "".join(f"{name:>18}" for name in names)]
        for category in categories:
            blocks = [report["budgets"][name]["by_category"][category] for name in names]
            figures = "".join(f"{block['loop_free_tokens_per_round']['value']:>18.2f}" for block in blocks)
            lines.append(f"{category:<26}{blocks[0]['prompts']:>8}{figures}")
    if stretches := lines_along(report["budgets"]):
        lines += ["", *stretches]
    return "\n".join(lines)


def _interval(figure: Mapping[str, float]) -> str:
    return f"{figure['value']:.2f} [{figure['low']:.2f}, {figure['high']:.2f}]"
