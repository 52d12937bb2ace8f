"""The verb ``bench``: heads beside plain decoding; drafts beside each other; batch × look-ahead."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from heads.base import DraftHeads
from heads.target import Target
from infer import bench, compare, drafters, evaluate, saturation
from infer.drafters import Drafter, HeadsDrafter
from infer.options import (
    budget_of,
    count,
    draft_option,
    dtype_option,
    named_prompts,
    numbers,
    others,
    positive,
    prompt_options,
    prompts_of,
    share,
    temperature,
    weights_of,
)

Report = tuple[dict[str, Any], str]
THEIRS: dict[str, tuple[str, ...]] = {
    "both": (compare.LOOKUP, compare.EXIT),
    "lookup": (compare.LOOKUP,),
    "early-exit": (compare.EXIT,),
    "none": (),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of ``bench``."""
    parser.add_argument("heads", nargs="?", help="folder or Hub id of heads; the target they name is loaded")
    parser.add_argument(
        "--target", metavar="NAME", help="where no draft needs heads, or the heads' target is no longer under its name"
    )
    dtype_option(parser)
    prompt_options(parser, 12)
    parser.add_argument(
        "--warmup",
        type=positive,
        default=4,
        metavar="N",
        help="held-out prompts, others than those timed, that warm up and choose the draft (default: %(default)s)",
    )
    draft_option(parser, "auto", "auto: what measured costs and acceptance choose")
    several = parser.add_argument_group(
        "several drafts in one run",
        "beside model.generate plain, with its own prompt lookup, and with its early exit",
    )
    several.add_argument(
        "--drafts",
        type=drafts,
        metavar="A,B",
        help="such as heads,lookup,lookup+heads,model:PATH,layers:0-9,none",
    )
    several.add_argument(
        "--temperature", type=numbers(temperature), default=[0.0], metavar="T,T", help="0 is greedy (default: 0)"
    )
    several.add_argument("--top-p", type=share, default=1.0, metavar="P", help="of sampling (default: %(default)s)")
    several.add_argument("--seed", type=int, default=0, help="of sampling (default: %(default)s)")
    several.add_argument(
        "--control",
        choices=("auto", "fixed"),
        default="auto",
        help="how far our drafts go: look-ahead control, or always each drafter's own length (default: %(default)s)",
    )
    several.add_argument(
        "--theirs",
        choices=tuple(THEIRS),
        default="both",
        help="transformers' own ways of drafting to compare with (default: %(default)s)",
    )
    several.add_argument(
        "--early-exit", type=positive, metavar="N", help="layers of transformers' early exit (default: half of them)"
    )
    table = parser.add_argument_group(
        "batch × look-ahead", "one draft, many texts at once, to where drafting stops paying"
    )
    table.add_argument("--batches", type=numbers(positive), metavar="B,B", help="such as 1,4,16")
    table.add_argument("--depths", type=numbers(count), default=[0, 2, 4, 8], metavar="K,K", help="(default: 0,2,4,8)")
    table.add_argument("--repeats", type=positive, default=3, metavar="N", help="of the table (default: %(default)s)")


def drafts(text: str) -> list[str]:
    """Specs with commas between them; a piece that starts with a digit goes on with layers (``layers:0-8,20-29``)."""
    specs: list[str] = []
    for piece in text.split(","):
        if specs and piece[:1].isdigit():
            specs[-1] += f",{piece}"
        else:
            specs.append(piece)
    return specs


def run(args: argparse.Namespace) -> Report:
    """Time what the options name."""
    prompts = prompts_of(args)
    if args.heads is None and args.drafts is None:
        raise ValueError("bench needs HEADS, or --drafts with --target NAME")
    target, heads = _load(args)
    questions = evaluate.ask(prompts, target.tokenizer())
    about = {"heads": args.heads, "prompts": named_prompts(args)}
    if args.batches is not None:
        report = saturation.saturation(
            target,
            _only(args, heads, target),
            questions,
            args.batches,
            args.depths,
            max_new_tokens=args.max_new_tokens,
            repeats=args.repeats,
        )
        return about | report, saturation.table(report)
    warmup = evaluate.ask(others(prompts, args.warmup), target.tokenizer())
    if args.drafts is not None:
        made = {spec: drafters.make(spec, heads, target) for spec in args.drafts}
        report = compare.compare(
            target,
            compare.ways(
                target,
                made,
                control=args.control,
                exit_layer=args.early_exit,
                top_p=args.top_p,
                theirs=THEIRS[args.theirs],
            ),
            questions,
            warmup,
            args.temperature,
            max_new_tokens=args.max_new_tokens,
            seed=args.seed,
        )
        return {"ok": not report["stopped"]} | about | report, compare.table(report)
    assert heads is not None
    drafter = HeadsDrafter(heads)
    report = bench.bench(
        target,
        drafter,
        questions,
        warmup,
        max_new_tokens=args.max_new_tokens,
        budget=budget_of(args.draft, "auto", drafter.lookahead),
    )
    about["heads_sha256"] = weights_of(args.heads)
    return {"ok": report["equality"]["explained"]} | about | report, bench.table(report)


def _load(args: argparse.Namespace) -> tuple[Target, DraftHeads | None]:
    dtype = getattr(torch, args.dtype)
    target = None if args.target is None else Target.load(args.target, dtype=dtype)
    if args.heads is not None:
        heads = DraftHeads.from_pretrained(args.heads, target, dtype=dtype)
        return heads.target, heads
    if target is None:
        raise ValueError("without HEADS, name what decodes with --target")
    return target, None


def _only(args: argparse.Namespace, heads: DraftHeads | None, target: Target) -> Drafter:
    specs = args.drafts or ["heads"]
    if len(specs) > 1:
        raise ValueError(f"--batches measures one draft, not {len(specs)}: name one with --drafts")
    return drafters.make(specs[0], heads, target)
