"""The verb ``stability``: does any draft change the text, with ``stable`` passes and without, and what do they cost."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from heads.grow import Budget
from heads.target import Target
from infer import drafters, stability
from infer.drafters import Drafter
from infer.evaluate import ask
from infer.options import count, dtype_option, load, positive, prompt_options, prompts_of
from infer.stable import ROWS

Report = tuple[dict[str, Any], str]


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of ``stability``."""
    parser.add_argument("heads", nargs="?", help="folder or Hub id of heads that draft too; their target is loaded")
    parser.add_argument("--target", metavar="NAME", help="instead of heads: replayed drafts and lookup only")
    parser.add_argument(
        "--usual", type=count, metavar="N", help="prompts also answered without stable passes (default: all)"
    )
    parser.add_argument(
        "--replays",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also draft what the answer without a draft said, whole, ragged and as trees (default: %(default)s)",
    )
    parser.add_argument("--rows", type=positive, metavar="N", help="of a stable pass (default: those of stable=True)")
    dtype_option(parser)
    prompt_options(parser, 10)


def run(args: argparse.Namespace) -> Report:
    """Answer the prompts in every way and compare."""
    if (args.heads is None) == (args.target is None):
        raise ValueError("name heads or --target, one of them")
    found: dict[str, tuple[Drafter, Budget | None]] = {}
    rows = args.rows or ROWS
    if args.heads is not None:
        own = load(args)
        target = own.heads.target
        found |= stability.shapes("heads", own, rows)
    else:
        target = Target.load(args.target, dtype=getattr(torch, args.dtype))
    found["lookup"] = drafters.make("lookup", None, target), None
    questions = ask(prompts_of(args), target.tokenizer())
    report = stability.measure(
        target,
        questions,
        found,
        rows=rows,
        max_new_tokens=args.max_new_tokens,
        usual=args.usual,
        replays=args.replays,
    )
    report["ok"] = all(cell["same"] == cell["prompts"] for cell in report["stable"].values())
    return report, stability.table(report)
