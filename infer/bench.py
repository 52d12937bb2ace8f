"""Wall-clock: decoding with heads beside the same target without, interleaved in one process.

Three arms answer each prompt in turn, in an order that rotates: bare ``model.generate``, this project's loop without a
draft, and the loop with heads. All are timed alike, from outside, by when tokens reach a streamer: the first token
ends the prefill (TTFT), the rest is decoding. The baseline is the faster of the first two. The heads' budget is chosen
by look-ahead from costs and acceptance measured on warm-up prompts, which are not among those timed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from heads.grow import Budget
from heads.target import Target
from infer.costs import measure_costs
from infer.drafters import Drafter, NoDrafter
from infer.drafters.inside import inside_of
from infer.evaluate import TREE_WIDTH, Question, Settings, measure_acceptance
from infer.lookahead import PLAIN, Acceptance, Candidate, CostTable, candidates
from infer.machine import machine
from infer.metrics import loop_free, pooled
from infer.progress import progress
from infer.rounding import FLOAT32_GAP, first_difference, logit_noise
from infer.timing import Run, bare, loop, median_ratio, percentile, pooled_ratio, speed

GENERATE, LOOP, HEADS = "model.generate", "loop without draft", "heads"
DYNAMIC_ROWS = (8, 16, 32)


Arm = Callable[[Question], Run]


@dataclass(frozen=True)
class Chosen:
    """The budget to draft with, and why."""

    budget: Budget
    candidates: list[Candidate] = field(default_factory=list)
    costs: CostTable | None = None
    acceptance: Acceptance | None = None


def choose_budget(target: Target, drafter: Drafter, warmup: Sequence[Question], max_new_tokens: int = 64) -> Chosen:
    """Measure costs and acceptance on warm-up prompts and take the fastest way to decode, plain included."""
    if drafter.lookahead == 0:
        return Chosen(PLAIN)
    longest = max(warmup, key=lambda question: question.ids.shape[1])
    dynamic = [Budget(rows=rows, depth=drafter.lookahead, width=TREE_WIDTH) for rows in DYNAMIC_ROWS]
    inside = inside_of(drafter)
    if inside is not None:  # what a round yields hangs on the rows of the one before: budgets are measured as they are
        dynamic += [inside.usual(depth) for depth in range(1, drafter.lookahead + 1)]
    settings = Settings(max_new_tokens)
    acceptance = measure_acceptance(target, drafter, warmup, settings, dynamic=dynamic, chain=inside is None)
    if inside is not None:
        acceptance = replace(acceptance, ranks=())
    costs = measure_costs(target, drafter, longest.ids)
    ways = candidates(costs, acceptance)
    return Chosen(ways[0].budget, ways, costs, acceptance)


@torch.inference_mode()
def bench(
    target: Target,
    drafter: Drafter,
    questions: Sequence[Question],
    warmup: Sequence[Question],
    *,
    max_new_tokens: int = 96,
    budget: Budget | None = None,
) -> dict[str, Any]:
    """Time greedy answers to ``questions``.

    Args:
        target: the target.
        drafter: what drafts.
        questions: prompts to time.
        warmup: a few other prompts: they warm the machine up and choose the budget.
        max_new_tokens: length of answers.
        budget: use this one instead of choosing.

    Returns:
        A report of plain values. ``speedup`` is the median over prompts of baseline ÷ heads in seconds per token,
        without looped rounds; ``speedups`` has it with loops and as the ratio of pooled times.

    Raises:
        ValueError: no prompts, no warm-up prompts, or a prompt in both.
    """
    if not questions or not warmup:
        raise ValueError("a bench needs prompts to time and other prompts to warm up on")
    shared = {question.id for question in questions} & {question.id for question in warmup}
    if shared:
        raise ValueError(
            f"prompts {', '.join(sorted(shared))} are both timed and used to choose the budget: separate them"
        )
    chosen = Chosen(budget) if budget is not None else choose_budget(target, drafter, warmup)
    arms: dict[str, Arm] = {
        GENERATE: lambda question: bare(target, question, max_new_tokens),
        LOOP: lambda question: loop(target, NoDrafter(), question, PLAIN, max_new_tokens),
        HEADS: lambda question: loop(target, drafter, question, chosen.budget, max_new_tokens),
    }
    for arm in arms.values():
        arm(warmup[0])
    runs: dict[str, list[Run]] = {name: [] for name in arms}
    names = list(arms)
    for place, question in enumerate(progress(questions, len(questions), "timing")):
        turn = place % len(names)
        for name in names[turn:] + names[:turn]:
            runs[name].append(arms[name](question))
    return _report(target, questions, runs, chosen, warmup, max_new_tokens)


def _report(
    target: Target,
    questions: Sequence[Question],
    runs: Mapping[str, Sequence[Run]],
    chosen: Chosen,
    warmup: Sequence[Question],
    max_new_tokens: int,
) -> dict[str, Any]:
    baseline = max((GENERATE, LOOP), key=lambda name: speed(runs[name]))
    stats = [run.stats for run in runs[HEADS] if run.stats is not None]
    inside = sum(r.target_seconds + r.draft_seconds for s in stats for r in s.log)
    decode = sum(s.decode_seconds for s in stats)
    speedups = {
        f"{kind}{suffix}": compute(runs[baseline], runs[HEADS], without_loops)
        for suffix, without_loops in (("", False), ("_loop_free", True))
        for kind, compute in (("median", median_ratio), ("pooled", pooled_ratio))
    }
    return {
        "target": target.name,
        "settings": {
            "prompts": len(questions),
            "warmup_prompts": [question.id for question in warmup],
            "max_new_tokens": max_new_tokens,
            "decoding": "greedy",
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": str(target.device),
            "machine": machine(target.device),
            "threads": torch.get_num_threads(),
            "order": "interleaved by prompt, rotating",
        },
        "budget": _budget(chosen.budget),
        "lookahead": _lookahead(chosen),
        "baseline": baseline,
        "speedup": speedups["median_loop_free"],
        "speedups": speedups,
        "tokens_per_round": pooled(stats)._asdict(),
        "loop_free_tokens_per_round": pooled(stats, without_loops=True)._asdict(),
        "looped_rounds": sum(s.rounds for s in stats) - len(loop_free(stats)),
        "forward_share": inside / decode if decode else 0.0,
        "arms": {name: _arm(each) for name, each in runs.items()},
        "equality": _equality(target, questions, runs, chosen.budget),
    }


def _budget(budget: Budget) -> dict[str, Any]:
    shape = None if budget.shape is None else [list(path) for path in budget.shape]
    return {"rows": budget.rows, "depth": budget.depth, "width": budget.width, "shape": shape}


def _lookahead(chosen: Chosen) -> dict[str, Any] | None:
    """The costs and the best few ways that led to the budget; None where it was given."""
    if chosen.costs is None:
        return None
    return {
        "costs": chosen.costs.to_dict(),
        "candidates": [
            {"name": way.name, "tokens": way.tokens, "seconds": way.seconds, "speed": way.speed}
            for way in chosen.candidates
        ],
    }


def _arm(runs: Sequence[Run]) -> dict[str, Any]:
    tokens, seconds = map(sum, zip(*(run.work() for run in runs), strict=True))
    per_token = sorted(value for run in runs for value in run.per_token())
    waits = sorted(wait for run in runs for wait in run.waits)
    return {
        "tokens": tokens,
        "decode_seconds": seconds,
        "tokens_per_second": speed(runs),
        "tokens_per_second_loop_free": speed(runs, without_loops=True),
        "ttft_seconds": {"p50": statistics.median(run.ttft for run in runs)},
        "inter_token_seconds": {"p50": percentile(per_token, 0.5), "p95": percentile(per_token, 0.95)},
        "wait_seconds": {"p50": percentile(waits, 0.5), "p95": percentile(waits, 0.95)},
    }


def _equality(
    target: Target, questions: Sequence[Question], runs: Mapping[str, Sequence[Run]], budget: Budget
) -> dict[str, Any]:
    """Tokens of both loops beside those of ``model.generate``; differences held against the target's rounding."""
    half = target.dtype in (torch.bfloat16, torch.float16)
    found = []
    for name in (LOOP, HEADS):
        for question, theirs, ours in zip(questions, runs[GENERATE], runs[name], strict=True):
            difference = first_difference(target, question.ids, ours.tokens, theirs.tokens)
            if difference is not None:
                found.append({"prompt": question.id, "arm": name} | difference.to_dict())
    bound = FLOAT32_GAP
    if half and found:
        texts = [(question.ids, run.tokens) for question, run in zip(questions[:2], runs[GENERATE], strict=False)]
        bound = logit_noise(target, texts, max(2, budget.rows))
    gaps = [float("inf") if row["gap"] is None else float(row["gap"]) for row in found]
    return {
        "texts": 2 * len(questions),
        "identical": not found,
        "explained": all(gap < bound or gap == 0 for gap in gaps),
        "bound": bound,
        "differences": found,
    }


def table(report: Mapping[str, Any]) -> str:
    """The report for people."""
    settings, budget, equality = report["settings"], report["budget"], report["equality"]
    shape = (
        "plain decoding" if budget["depth"] == 0 else f"a draft of {budget['rows'] - 1} tokens, {budget['depth']} deep"
    )
    lines = [
        f"{report['target']} ({settings['dtype']}, {settings['device']}, {settings['threads']} threads), "
        f"{settings['prompts']} prompts, up to {settings['max_new_tokens']} new tokens, greedy, {settings['order']}",
        f"draft: {shape}" + (" (chosen from measured costs)" if report["lookahead"] else " (given)"),
        "",
        f"{'':<20}{'tok/s':>8}{'no loops':>10}{'TTFT ms':>9}{'inter-token ms p50':>20}{'p95':>7}"
        f"{'wait ms p50':>13}{'p95':>7}",
    ]
    for name, arm in report["arms"].items():
        per, wait = arm["inter_token_seconds"], arm["wait_seconds"]
        lines.append(
            f"{name:<20}{arm['tokens_per_second']:>8.1f}{arm['tokens_per_second_loop_free']:>10.1f}"
            f"{1e3 * arm['ttft_seconds']['p50']:>9.1f}{1e3 * per['p50']:>20.1f}{1e3 * per['p95']:>7.1f}"
            f"{1e3 * wait['p50']:>13.1f}{1e3 * wait['p95']:>7.1f}"
        )
    gain, tau, free = report["speedups"], report["tokens_per_round"], report["loop_free_tokens_per_round"]
    lines += [
        "",
        f"speed-up over {report['baseline']} (the faster baseline), loop-free: median {gain['median_loop_free']:.2f}, "
        f"pooled {gain['pooled_loop_free']:.2f}; loops included: {gain['median']:.2f}, {gain['pooled']:.2f}",
        f"tokens per round: loop-free {free['value']:.2f} [{free['low']:.2f}, {free['high']:.2f}], "
        f"with loops {tau['value']:.2f} [{tau['low']:.2f}, {tau['high']:.2f}]",
        f"inside the target's and the heads' forwards: {report['forward_share']:.1%} of decode time",
        _equality_line(equality),
    ]
    return "\n".join(lines)


def _equality_line(equality: Mapping[str, Any]) -> str:
    if equality["identical"]:
        return f"tokens: all {equality['texts']} texts equal those of model.generate"
    rows = equality["differences"]
    verdict = "all near-ties" if equality["explained"] else "NOT ALL NEAR-TIES"
    gaps = ", ".join("text ends" if row["gap"] is None else f"{row['gap']:.2g}" for row in rows)
    return (
        f"tokens: {len(rows)} of {equality['texts']} texts differ from model.generate, {verdict}: "
        f"gaps {gaps}; bound {equality['bound']:.2g}"
    )
