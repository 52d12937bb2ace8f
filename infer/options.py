"""What the verbs of this package share: how heads, prompts and drafts are named on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from heads.base import DraftHeads
from heads.grow import Budget
from heads.hub import fetch
from heads.store import weights_digest
from heads.target import Target
from infer.drafters import HeadsDrafter
from infer.evaluate import TREE_WIDTH
from infer.prompts import BUILTIN, Prompt, read_prompts

T = TypeVar("T")

SAMPLE = Path(__file__).resolve().parents[1] / "data" / "sample" / "heldout.jsonl.gz"
DTYPES = ("bfloat16", "float32", "float16")

# how a draft is written on the command line → its budget, given a number and the heads' look-ahead
DRAFTS: dict[str, Callable[[int, int], Budget]] = {
    "chain": lambda number, lookahead: Budget.chain(number),
    "tree": lambda number, lookahead: Budget(rows=number, depth=lookahead, width=TREE_WIDTH),
}


def heads_options(parser: argparse.ArgumentParser) -> None:
    """Which heads, in which dtype."""
    parser.add_argument("heads", help="folder or Hub id of heads, or of a bundle; the target they name is loaded")
    parser.add_argument("--target", metavar="NAME", help="the heads' target, where it is no longer under its name")
    dtype_option(parser)


def dtype_option(parser: argparse.ArgumentParser) -> None:
    """In which dtype."""
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="of target and heads (default: %(default)s)"
    )


def prompt_options(parser: argparse.ArgumentParser, count: int) -> None:
    """Which prompts, how many (``count`` of the sample by default), and how long the answers."""
    parser.add_argument(
        "--prompts",
        action="append",
        metavar="FILE",
        help=f"jsonl with messages, prompt or turns, or {', '.join(BUILTIN)}; may be given several times (default: the "
        "held-out part of the sample that comes along)",
    )
    parser.add_argument("--per-category", type=positive, metavar="N", help="first N of each category (default: all)")
    parser.add_argument(
        "--count", type=positive, metavar="N", help=f"first N of all (default: {count} of the sample, all of a file)"
    )
    parser.add_argument("--max-new-tokens", type=positive, default=96, metavar="N", help="(default: %(default)s)")
    parser.set_defaults(sample_count=count)


def positive(text: str) -> int:
    """A count of 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def draft_option(parser: argparse.ArgumentParser, default: str, extra: str) -> None:
    """How to draft; ``extra`` explains the default."""
    parser.add_argument(
        "--draft", default=default, metavar="DRAFT", help=f"{extra}; chain:K; tree:ROWS (default: %(default)s)"
    )


def budget_of(text: str, word: str, lookahead: int) -> Budget | None:
    """The budget that a command line's draft means; None for ``word``, which leaves it open.

    Raises:
        ValueError: it is written in no known way.
    """
    if text == word:
        return None
    kind, _, number = text.partition(":")
    if kind not in DRAFTS or not number.isdecimal() or int(number) < 1:
        raise ValueError(f"--draft {text!r} is not known: write {word}, {', '.join(f'{kind}:N' for kind in DRAFTS)}")
    return DRAFTS[kind](int(number), lookahead)


def load(args: argparse.Namespace) -> HeadsDrafter:
    """The heads that were named, on their target, as a drafter."""
    dtype = getattr(torch, args.dtype)
    target = None if args.target is None else Target.load(args.target, dtype=dtype)
    return HeadsDrafter(DraftHeads.from_pretrained(args.heads, target, dtype=dtype))


def weights_of(heads: str) -> str:
    """SHA-256 of the weights of the heads that were named, so that a report can be held against others."""
    return weights_digest(fetch(heads))


def sample() -> Path:
    """The held-out part of the sample that comes along.

    Raises:
        FileNotFoundError: it is not there.
    """
    if not SAMPLE.is_file():
        raise FileNotFoundError(f"the sample {SAMPLE} is missing: name a file with --prompts")
    return SAMPLE


def prompts_of(args: argparse.Namespace) -> list[Prompt]:
    """The prompts a verb works on."""
    if args.prompts is not None:
        found = [prompt for file in args.prompts for prompt in read_prompts(file, per_category=args.per_category)]
        return found[: args.count]
    return read_prompts(sample(), per_category=args.per_category, limit=args.count or args.sample_count)


def named_prompts(args: argparse.Namespace) -> str:
    """Where the prompts came from, for a report."""
    return ", ".join(args.prompts or [str(SAMPLE)])


def numbers(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Of an option that takes several values with commas between them."""

    def read(text: str) -> list[T]:
        return [kind(part) for part in text.split(",")]

    read.__name__ = f"list of {kind.__name__}"  # argparse names it in its error
    return read


def count(text: str) -> int:
    """A count of 0 or more."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more")
    return value


def above_zero(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def part(text: str) -> float:
    """A share that is more than none."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value


def share(text: str) -> float:
    """A share between 0 and 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def temperature(text: str) -> float:
    """0 or more."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no temperature: 0 is greedy, above it is sampled")
    return value


def others(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Held-out prompts for measuring beforehand: the last of the sample, none of which is among ``prompts``."""
    asked = {str(prompt.messages) for prompt in prompts}
    rest = [prompt for prompt in read_prompts(sample()) if str(prompt.messages) not in asked]
    if len(rest) < count:
        raise ValueError(
            f"{count} held-out prompts are needed to measure on beforehand and only {len(rest)} are left: use fewer"
        )
    return [Prompt(f"sample {prompt.id}", prompt.category, prompt.messages) for prompt in rest[-count:]]
