"""What the verbs of this package have in common on the command line."""

from __future__ import annotations

import argparse
import math
from typing import Any, Protocol

from data.completer import Completer
from data.roles import ROLES

TARGET = "headstart/smollm2-135m-q4"
"""The embedded default target's name."""

Report = tuple[dict[str, Any], str]


class Engine(Protocol):
    """Loads a target: ``(target, dtype, batch size, heads to draft with) → (engine, tokenizer)``."""

    def __call__(
        self, target: str, dtype: str, batch_size: int, heads: str | None = None, /
    ) -> tuple[Completer, Any]: ...


def amount(text: str) -> float:
    """A fraction below 1, or a whole count; 0 for none."""
    value = float(text)
    if not 0 <= value < math.inf or (value >= 1 and value != int(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a fraction below 1 nor a count")
    return value


def switch(parser: argparse.ArgumentParser, name: str, help: str) -> None:
    """A flag that can be turned on and off; off by default."""
    parser.add_argument(name, action=argparse.BooleanOptionalAction, default=False, help=f"{help} (default: off)")


def role(text: str) -> tuple[str, str]:
    """``NAME=ROLE`` → both."""
    name, sign, meant = text.rpartition("=")
    if not sign or not name.strip() or meant not in ROLES.values():
        known = ", ".join(dict.fromkeys(ROLES.values()))
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=ROLE with a role of {known}")
    return name, meant


def source_options(parser: argparse.ArgumentParser) -> None:
    """What every verb that reads conversations asks for."""
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="file (.jsonl, .json, .parquet, .csv; gzipped or not), folder of files, or ORG/NAME[:SPLIT] on the Hub",
    )
    parser.add_argument(
        "--role",
        type=role,
        action="append",
        default=[],
        metavar="NAME=ROLE",
        help="what a role's name means, e.g. my-model=assistant; may be given several times",
    )


def engine_options(parser: argparse.ArgumentParser) -> None:
    """How the local engine runs the target."""
    parser.add_argument("--target", default=TARGET, help="embedded name, folder or Hub id (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=128, help="rows decoded together (default: %(default)s)")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="of the target (default: %(default)s)",
    )


def within(args: argparse.Namespace, *, above: tuple[str, ...] = (), least: tuple[str, ...] = ()) -> None:
    """Refuse numbers that are not finite, and not above 0, or not 0 or more.

    Raises:
        ValueError: one of them is.
    """
    for name in (*above, *least):
        value, limit = getattr(args, name), "above 0" if name in above else "0 or more"
        if not math.isfinite(value) or value < 0 or (name in above and not value):
            raise ValueError(f"--{name.replace('_', '-')} is {value:g}, it must be {limit}")


def at_least_one(args: argparse.Namespace, *names: str) -> None:
    """Refuse counts below 1.

    Raises:
        ValueError: one of them is.
    """
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}, it must be 1 or more")
