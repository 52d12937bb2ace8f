"""Ways to draft beside each other on the clock, by category and temperature, all in one run.

Every way answers each prompt in turn, in an order that rotates: bare ``model.generate``, this project's loop without a
draft (the baseline is the faster of the two), any drafters, and transformers' own prompt lookup and early exit. All are
timed alike, from outside, by when tokens reach a streamer. Each τ and speed stands with and without loops of the text.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from heads.target import Target
from infer.costs import settings, where
from infer.drafters import Drafter, NoDrafter
from infer.evaluate import Question
from infer.lookahead import PLAIN
from infer.metrics import Stats
from infer.progress import progress
from infer.rounding import FLOAT32_GAP, first_difference, logit_noise
from infer.timing import Run, bare, loop, median_ratio, pooled_ratio, speed, tokens_per_round

GENERATE, LOOP, LOOKUP, EXIT = "model.generate", "loop without draft", "transformers lookup", "transformers early exit"
LOOKUP_TOKENS = 10  # transformers' documentation uses as many
ROWS = 16  # of the wide pass whose rounding a near-tie is held against

Way = Callable[[Question, int, float, int], Run]  # prompt, new tokens, temperature, seed


def ways(
    target: Target,
    drafters: Mapping[str, Drafter],
    *,
    control: str = "auto",
    exit_layer: int | None = None,
    top_p: float = 1.0,
    theirs: Sequence[str] = (LOOKUP, EXIT),
) -> dict[str, Way]:
    """Everything to compare, by name.

    Args:
        target: what decodes.
        drafters: ours, by the spec they were written as.
        control: ``"auto"``, or ``"fixed"`` for chains of each drafter's own length.
        exit_layer: layers that transformers' early exit drafts with, half of them by default.
        top_p: of sampling.
        theirs: transformers' own ways of drafting to compare with.
    """
    exit_layer = exit_layer or max(1, target.config.num_hidden_layers // 2)

    def plain(question: Question, new: int, temperature: float, seed: int) -> Run:
        return loop(target, NoDrafter(), question, PLAIN, new, temperature, seed, top_p=top_p)

    def drafting(drafter: Drafter) -> Way:
        def run(question: Question, new: int, temperature: float, seed: int) -> Run:
            return loop(target, drafter, question, None, new, temperature, seed, control, top_p)

        return run

    def generating(**settings: Any) -> Way:
        return lambda question, new, temperature, seed: bare(
            target, question, new, temperature, seed, top_p, **settings
        )

    own = {LOOKUP: {"prompt_lookup_num_tokens": LOOKUP_TOKENS}, EXIT: {"assistant_early_exit": exit_layer}}
    return {
        GENERATE: generating(),
        LOOP: plain,
        **{name: drafting(drafter) for name, drafter in drafters.items()},
        **{name: generating(**own[name]) for name in theirs},
    }


@torch.inference_mode()
def compare(
    target: Target,
    arms: Mapping[str, Way],
    questions: Sequence[Question],
    warmup: Sequence[Question],
    temperatures: Sequence[float] = (0.0,),
    *,
    max_new_tokens: int = 96,
    seed: int = 0,
) -> dict[str, Any]:
    """Time every way on every prompt at every temperature.

    Args:
        target: what decodes.
        arms: the ways; ``model.generate`` and the loop without a draft among them.
        questions: prompts to time.
        warmup: others that warm each way up; one of transformers' own that fails on them is left out, with its reason.
        temperatures: 0 is greedy.
        max_new_tokens: length of answers.
        seed: of sampling; each prompt has its own, the same for every way.

    Returns:
        A report of plain values: ``settings``, ``not_applicable`` (name -> reason) and under ``temperatures`` a block
        each (see :func:`_block`). Prompts of different categories take turns, so that a comparison which Ctrl-C ends
        early (``stopped`` says so) is of all categories, and of those prompts that every way has answered.

    Raises:
        ValueError: no prompts, no warm-up prompts, or a prompt in both.
    """
    if not questions or not warmup:
        raise ValueError("a comparison needs prompts to time and other prompts to warm up on")
    if shared := {question.id for question in questions} & {question.id for question in warmup}:
        raise ValueError(f"prompts {', '.join(sorted(shared))} are both timed and used to warm up: separate them")
    missing = _warm(target, arms, warmup[0], max_new_tokens, temperatures, seed)
    names = [name for name in arms if name not in missing]
    blocks, stopped = {}, False
    questions = alternating(questions)
    for temperature in temperatures:
        runs: dict[str, list[Run]] = {name: [] for name in names}
        try:
            for place, question in enumerate(progress(questions, len(questions), f"timing at {temperature:g}")):
                turn = place % len(names)
                for name in names[turn:] + names[:turn]:
                    runs[name].append(arms[name](question, max_new_tokens, temperature, seed + place))
        except KeyboardInterrupt:
            stopped = True
        whole = min(map(len, runs.values()))
        if not whole:
            raise KeyboardInterrupt
        blocks[f"{temperature:g}"] = _block(
            target, questions[:whole], {name: each[:whole] for name, each in runs.items()}, temperature
        )
        if stopped:
            break
    return {
        "target": target.name,
        "settings": {
            "prompts": len(questions),
            "max_new_tokens": max_new_tokens,
            "seed": seed,
            "order": "interleaved by prompt, rotating",
            **settings(target),
        },
        "not_applicable": missing,
        "stopped": stopped,
        "temperatures": blocks,
    }


def alternating(questions: Sequence[Question]) -> list[Question]:
    """One of each category, then the next of each; their order within a category stays."""
    seen: Counter[str] = Counter()
    turns = []
    for question in questions:
        turns.append(seen[question.category])
        seen[question.category] += 1
    return [question for _, question in sorted(zip(turns, questions, strict=True), key=lambda pair: pair[0])]


def _warm(
    target: Target,
    arms: Mapping[str, Way],
    question: Question,
    max_new_tokens: int,
    temperatures: Sequence[float],
    seed: int,
) -> dict[str, str]:
    """Run each way once at each temperature; the reasons of those of transformers' own that do not work here."""
    missing = {}
    layers = target.config.num_hidden_layers
    for name, arm in arms.items():
        for temperature in temperatures:
            try:
                arm(question, max_new_tokens, temperature, seed)
            except Exception as wrong:  # whatever transformers raises is its reason
                if name not in (LOOKUP, EXIT):
                    raise
                missing[name] = f"{type(wrong).__name__}: {wrong}"
                target.config.num_hidden_layers = layers  # an early exit that fails leaves the model cut short
                break
    return missing


def _block(
    target: Target, questions: Sequence[Question], runs: Mapping[str, Sequence[Run]], temperature: float
) -> dict[str, Any]:
    """One temperature: the baseline's name, and figures of every way over all prompts and by category."""
    baseline = max((GENERATE, LOOP), key=lambda name: speed(runs[name]))
    categories = dict.fromkeys(question.category for question in questions)
    places = {"all": list(range(len(questions)))} | {
        name: [at for at, question in enumerate(questions) if question.category == name] for name in categories
    }
    bound = _noise(target, questions, runs[GENERATE])
    ways = {}
    for name, each in runs.items():
        figures = {}
        for category, at in places.items():
            picked, base = [each[i] for i in at], [runs[baseline][i] for i in at]
            figures[category] = _figures(picked, base)
            if not temperature:
                pairs = [(questions[i], each[i], runs[GENERATE][i]) for i in at]
                figures[category] |= _identity(target, pairs, bound)
        ways[name] = figures
    return {"baseline": baseline, "bound": bound, "ways": ways}


def _figures(runs: Sequence[Run], base: Sequence[Run]) -> dict[str, Any]:
    found: dict[str, Any] = {"prompts": len(runs), "tokens": sum(len(run.tokens) for run in runs)}
    for suffix, without in (("", False), ("_loop_free", True)):
        found[f"tokens_per_round{suffix}"] = tokens_per_round(runs, without)
        found[f"tokens_per_second{suffix}"] = speed(runs, without)
        found[f"speedup{suffix}"] = median_ratio(base, runs, without)
        found[f"pooled_speedup{suffix}"] = pooled_ratio(base, runs, without)
    accounts = [run.stats for run in runs if run.stats is not None]
    if accounts:
        found["forward_share"] = Stats.pooled(accounts).forward_share
    return found | {"ttft_seconds": statistics.median(run.ttft for run in runs)}


def _identity(target: Target, pairs: Sequence[tuple[Question, Run, Run]], bound: float) -> dict[str, int]:
    """Texts that equal ``model.generate``'s, and those that part from it at a near-tie of the target's."""
    differences = [first_difference(target, q.ids, ours.tokens, theirs.tokens) for q, ours, theirs in pairs]
    found = [difference for difference in differences if difference is not None]
    return {
        "identical": len(pairs) - len(found),
        "near_ties": sum(difference.gap < bound or difference.gap == 0 for difference in found),
    }


def _noise(target: Target, questions: Sequence[Question], runs: Sequence[Run]) -> float:
    if target.dtype not in (torch.bfloat16, torch.float16):
        return FLOAT32_GAP
    texts = [(question.ids, run.tokens) for question, run in zip(questions[:2], runs, strict=False)]
    return logit_noise(target, texts, ROWS)


def table(report: Mapping[str, Any]) -> str:
    """The report for people."""
    with_settings = report["settings"]
    lines = [
        f"{where(report)}, {with_settings['prompts']} prompts, up to {with_settings['max_new_tokens']} new tokens, "
        f"{with_settings['order']}"
    ]
    for temperature, block in report["temperatures"].items():
        timed = block["ways"][block["baseline"]]["all"]["prompts"]
        early = "" if timed == with_settings["prompts"] else f"; stopped after {timed} prompts"
        lines += ["", f"temperature {temperature}; speed-up over {block['baseline']}, the faster baseline{early}", ""]
        lines += [*_summary(block["ways"]), "", *_by_category(block["ways"])]
    lines += ["", *(f"{name}: not applicable: {why}" for name, why in report["not_applicable"].items())]
    return "\n".join(lines).rstrip()


def _summary(ways: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{'':<26}{'τ':>6}{'no loops':>10}{'speed-up':>10}{'no loops':>10}{'pooled':>8}{'TTFT ms':>9}{'forwards':>10}  "
        "identical"
    ]
    for name, figures in ways.items():
        row = figures["all"]
        same = "(sampled)"
        if "identical" in row:
            same = f"{row['identical']}/{row['prompts']}"
            parted = row["prompts"] - row["identical"]
            same += f", {row['near_ties']} of {parted} others near-ties" if parted else ""
        lines.append(
            f"{name:<26}{row['tokens_per_round']:>6.2f}{row['tokens_per_round_loop_free']:>10.2f}"
            f"{row['speedup']:>10.2f}{row['speedup_loop_free']:>10.2f}{row['pooled_speedup_loop_free']:>8.2f}"
            f"{1e3 * row['ttft_seconds']:>9.1f}{_percent(row.get('forward_share')):>10}  {same}"
        )
    return lines


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _by_category(ways: Mapping[str, Any]) -> list[str]:
    """τ and median speed-up without loops."""
    categories = [name for name in next(iter(ways.values())) if name != "all"]
    if len(categories) < 2:
        return []
    shown = [name for name in ways if name not in (GENERATE, LOOP)]
    width = max(16, *(len(name) + 2 for name in shown))
    lines = [f"{'τ × speed-up, no loops':<26}" + "".join(f"{name:>{width}}" for name in shown)]
    for category in categories:
        cells = [_cell(ways[name][category]) for name in shown]
        lines.append(f"{category:<26}" + "".join(f"{cell:>{width}}" for cell in cells))
    return lines


def _cell(figures: Mapping[str, float]) -> str:
    return f"{figures['tokens_per_round_loop_free']:.2f} ×{figures['speedup_loop_free']:.2f}"
