"""The verb ``generate``: one prompt answered with heads, streamed, accepted draft tokens marked when asked."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from infer import show
from infer.generate import generate
from infer.options import budget_of, draft_option, heads_options, load, positive
from infer.watch import Watched

Report = tuple[dict[str, Any], str]


def configure(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    heads_options(parser)
    parser.add_argument("prompt", help="what to answer")
    parser.add_argument(
        "--raw", action="store_true", help="go on with the bare text instead of answering it as a chat turn"
    )
    parser.add_argument("--max-new-tokens", type=positive, default=256, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument(
        "--top-k", type=positive, metavar="K", help="sample of the K likeliest tokens (default: of all)"
    )
    parser.add_argument("--top-p", type=float, metavar="P", help="sample of the likeliest tokens that make up P")
    parser.add_argument("--seed", type=int, help="same seed, same text")
    parser.add_argument("--mark", action="store_true", help="mark the tokens that the draft got right")
    draft_option(parser, "heads", "heads: a chain as long as their look-ahead")


def run(args: argparse.Namespace) -> Report:
    """Stream the answer; the report has text, ids and what the draft was worth."""
    drafter = load(args)
    target, tokenizer = drafter.heads.target, drafter.heads.target.tokenizer()
    colour = show.wants_colour(sys.stdout)
    watched = Watched(drafter)
    chat = not args.raw and getattr(tokenizer, "chat_template", None)
    sampling: dict[str, Any] = {"do_sample": False}
    if args.temperature:
        # the model's own defaults would filter further than what was asked for
        sampling = {
            "do_sample": True,
            "temperature": args.temperature,
            "top_k": args.top_k or 0,
            "top_p": args.top_p or 1.0,
        }
    out = generate(
        target,
        [{"role": "user", "content": args.prompt}] if chat else args.prompt,
        draft=watched,
        tokenizer=tokenizer,
        seed=args.seed,
        stream=show.MarkedStream(watched.latest, show.Marker(tokenizer, colour), _say) if args.mark else _say,
        budget=budget_of(args.draft, "heads", drafter.lookahead),
        max_new_tokens=args.max_new_tokens,
        **sampling,
    )
    _say("\n")
    report = {
        "heads": args.heads,
        "target": target.name,
        "text": (out.texts or [""])[0],
        "ids": out.sequences[0, -out.stats.tokens :].tolist(),
    } | out.stats.to_dict()
    return report, f"\n{show.caption(out.stats, colour)}"


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
