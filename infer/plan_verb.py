"""The verb ``plan``: load what is to be planned for, measure, and say what drafts would gain."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import heads as trained
from heads.base import DraftHeads
from heads.grow import Budget
from heads.target import Target
from infer import plan
from infer.drafters import HeadsDrafter
from infer.drafters.inside import inside_of
from infer.evaluate import Question, Settings, ask, measure_acceptance
from infer.lookahead import Acceptance
from infer.options import dtype_option, numbers, positive, prompt_options, prompts_of, share
from infer.plot import draw

LAYERS_SHOWN = 5

Report = tuple[dict[str, Any], str]


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of ``plan``."""
    parser.add_argument("target", help="the embedded target's name, a folder, or a Hub id")
    parser.add_argument("heads", nargs="?", help="folder or Hub id of heads whose acceptance is measured")
    dtype_option(parser)
    parser.add_argument(
        "--acceptance",
        type=numbers(share),
        default=[0.6, 0.4, 0.8],
        metavar="A,A",
        help="share of drafted tokens accepted, assumed; the first is advised on (default: 0.6,0.4,0.8)",
    )
    parser.add_argument(
        "--batches", type=numbers(positive), default=[1, 4, 16], metavar="B,B", help="texts at once (default: 1,4,16)"
    )
    parser.add_argument("--kind", default="eagle", choices=list(trained.KINDS), help="of heads to train (%(default)s)")
    parser.add_argument("--lookahead", type=positive, metavar="K", help="deepest draft (default: the heads' own)")
    parser.add_argument(
        "--context", type=positive, default=128, metavar="N", help="tokens before those timed (default: %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=positive, default=5, metavar="N", help="of each timing (default: %(default)s)"
    )
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the plan (needs the extra `plot`)")
    parser.add_argument(
        "--layers", action="store_true", help="also search which of the target's own layers draft best for it"
    )
    prompt_options(parser, 4)


def run(args: argparse.Namespace) -> Report:
    """Measure and plan."""
    if args.png is not None and not args.png.parent.is_dir():
        raise FileNotFoundError(f"--png {args.png}: the folder {args.png.parent} does not exist, make it first")
    dtype = getattr(torch, args.dtype)
    target = Target.load(args.target, dtype=dtype)
    if args.heads is None:
        config = trained.make_config(args.kind, target, lookahead=args.lookahead)
        made = trained.build(config, target)
        made.initialize()
        made = made.to(device=target.device, dtype=dtype).eval()
    else:
        made = DraftHeads.from_pretrained(args.heads, target=target, dtype=dtype)
    drafter = HeadsDrafter(made)
    depth, inside = args.lookahead or drafter.lookahead, inside_of(drafter)
    questions = ask(prompts_of(args), target.tokenizer())
    ids = torch.cat([question.ids for question in questions], 1)
    ids = ids.repeat(1, -(-args.context // ids.shape[1]))[:, : args.context]
    measured = None
    if args.heads is not None:
        measured = _measured(target, drafter, questions, Settings(args.max_new_tokens), depth)
    costs = plan.measure(target, drafter, ids, args.batches, depth=depth, repeats=args.repeats)
    chain = Budget.chain if inside is None else inside.usual
    report = plan.plan(target, costs, args.batches, depth, assumed=args.acceptance, measured=measured, chain=chain)
    report = {"heads": args.heads or f"untrained, kind {args.kind}"} | report
    text = plan.table(report)
    if args.layers:
        from infer.drafters.layer_search import search

        tried = search(target, [question.ids for question in questions])
        report["layers"] = [found._asdict() | {"draft": found.spec} for found in tried]
        text += "\n\nthe target's own layers as a draft, the fastest of those tried\n"
        text += f"{'draft':<36}{'acceptance':>12}{'a token / a pass':>18}{'speed-up':>10}{'K':>4}\n"
        text += "\n".join(
            f"{found.spec:<36}{found.acceptance:>12.2f}{found.cost:>18.2f}{found.speedup:>10.2f}{found.lookahead:>4}"
            for found in tried[:LAYERS_SHOWN]
        )
    if args.png is not None:
        draw(report, args.png)
        text += f"\nplot written to {args.png}"
    return report, text


def _measured(
    target: Target, drafter: HeadsDrafter, questions: Sequence[Question], settings: Settings, depth: int
) -> Acceptance:
    """By decoding; heads that draft inside the pass with each budget of theirs, since rows decide what they draft."""
    inside = inside_of(drafter)
    if inside is None:
        return measure_acceptance(target, drafter, questions, settings, depth=depth)
    usual = [inside.usual(d) for d in range(1, depth + 1)]
    found = measure_acceptance(target, drafter, questions, settings, depth=depth, dynamic=usual, chain=False).dynamic
    tokens = [1.0, *(found[budget.rows, budget.depth, budget.width] for budget in usual)]
    return Acceptance(joint=tuple(b - a for a, b in pairwise(tokens)))
