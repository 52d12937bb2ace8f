"""The verbs ``eval``, ``bench``, ``plan``, ``stability``, ``verify`` and ``generate``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from infer import answer, bench_verb, evaluate, plan_verb, stability_verb, verify_verb
from infer.options import (
    heads_options,
    load,
    named_prompts,
    others,
    positive,
    prompt_options,
    prompts_of,
    weights_of,
)
from infer.prompts import Prompt, read_prompts

Report = tuple[dict[str, Any], str]


def register(add: Callable[..., None], closest: Callable[[Sequence[str], Sequence[str]], Any] | None = None) -> None:
    """Give the command line this package's verbs.

    Args:
        add: see ``headstart.Verbs.add``.
        closest: finds the most alike of training and evaluation prompts (an object with ``train``, ``heldout``,
            ``similarity`` and ``run``); ``eval`` has ``--training`` when it is given.
    """
    add(
        "eval",
        help="acceptance of heads by really decoding prompts: tokens per round, per position, by task",
        example="headstart eval runs/quickstart/heads --prompts spec_bench.jsonl --per-category 8 --json eval.json",
        configure=lambda parser: _configure_eval(parser, closest is not None),
        run=lambda args: _eval(args, closest),
    )
    add(
        "bench",
        help="wall-clock of decoding with heads, or any drafts, beside the target alone, interleaved in one run",
        example="headstart bench runs/quickstart/heads --drafts heads,lookup,lookup+heads --temperature 0,0.7",
        configure=bench_verb.configure,
        run=bench_verb.run,
    )
    add(
        "plan",
        help="what drafts would gain on this machine, before heads are trained or with heads that are",
        example="headstart plan headstart/smollm2-135m-q4 --acceptance 0.6 --batches 1,4,16 --png plan.png",
        configure=plan_verb.configure,
        run=plan_verb.run,
    )
    add(
        "stability",
        help="whether any draft changes a text in half precision, with stable=True and without, and what that costs",
        example="headstart stability --target headstart/smollm2-135m-q4 --count 5 --max-new-tokens 48",
        configure=stability_verb.configure,
        run=stability_verb.run,
    )
    add(
        "verify",
        help="certify that heads change nothing: greedy identity in float32 and bfloat16, sampled law by chi-square; "
        "of folders, Hub repositories, bundles and exported checkpoints",
        example="headstart verify runs/quickstart/heads --prompts-count 6 --draws 300",
        configure=verify_verb.configure,
        run=verify_verb.run,
    )
    add(
        "generate",
        help="answer a prompt with heads, streaming, and mark what the draft got right",
        example='headstart generate runs/quickstart/heads "Why is the sky blue?" --mark',
        configure=answer.configure,
        run=answer.run,
    )


def _configure_eval(parser: argparse.ArgumentParser, comparable: bool) -> None:
    heads_options(parser)
    prompt_options(parser, 16)
    parser.add_argument("--lookahead", type=positive, metavar="K", help="depth of drafts (default: the heads' own)")
    parser.add_argument(
        "--rows",
        type=int,
        nargs="*",
        default=list(evaluate.TREE_ROWS),
        metavar="N",
        help="rows of the target's pass for trees, none for chains only (default: 16 32)",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling (default: %(default)s)")
    parser.add_argument(
        "--calibrate",
        type=positive,
        default=4,
        metavar="N",
        help="held-out prompts, others than those evaluated, that shape the static trees (default: %(default)s)",
    )
    if comparable:
        parser.add_argument("--training", type=Path, metavar="FILE", help="training file: print the most alike prompts")


def _eval(args: argparse.Namespace, closest: Callable[[Sequence[str], Sequence[str]], Any] | None) -> Report:
    prompts = prompts_of(args)
    calibration = others(prompts, args.calibrate) if args.rows else []
    drafter = load(args)
    target, tokenizer = drafter.heads.target, drafter.heads.target.tokenizer()
    lookahead = args.lookahead or drafter.lookahead
    ranks: tuple[tuple[float, ...], ...] = ()
    if args.rows:
        ranks = evaluate.measure_acceptance(
            target,
            drafter,
            evaluate.ask(calibration, tokenizer),
            evaluate.Settings(args.max_new_tokens, args.temperature, args.seed),
            depth=lookahead,
            chain=False,
        ).ranks
    report = evaluate.evaluate(
        target,
        drafter,
        evaluate.ask(prompts, tokenizer),
        evaluate.default_budgets(lookahead, ranks, args.rows),
        evaluate.Settings(args.max_new_tokens, args.temperature, args.seed),
        ranks=ranks,
    )
    report = {"heads": args.heads, "heads_sha256": weights_of(args.heads), "prompts": named_prompts(args)} | report
    text = evaluate.table(report)
    if closest is not None and args.training is not None:
        report["closest"] = _closest(closest, read_prompts(args.training), prompts)
        pair = report["closest"]
        text += (
            f"\nclosest to training: {pair['similarity']:.2f} alike, {pair['run']} words in a row\n"
            f"  training:   {pair['training']!r}\n  evaluation: {pair['evaluation']!r}"
        )
    return report, text


def _closest(
    find: Callable[[Sequence[str], Sequence[str]], Any], training: Sequence[Prompt], evaluated: Sequence[Prompt]
) -> dict[str, Any]:
    seen, asked = ([prompt.messages[-1]["content"] for prompt in each] for each in (training, evaluated))
    pair = find(seen, asked)
    return {
        "similarity": pair.similarity,
        "run": pair.run,
        "training": seen[pair.train],
        "evaluation": asked[pair.heldout],
    }
