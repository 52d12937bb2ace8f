"""A comparison's report: figures of every arm, how many times one is the other, the table for people."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch

from infer.paired import times
from train.compare.arms import Taught
from train.compare.score import Score, agreement

VERSIONS = ("torch", "transformers", "accelerate", "numpy")


def figures(
    scores: Mapping[str, Score], made: Mapping[str, Taught], first: str, apart: Sequence[str]
) -> dict[str, Any]:
    """Plain values.

    Args:
        scores: by arm, controls among them.
        made: arms that have heads.
        first: the arm that the others are held against.
        apart: controls, which are not: they say what is possible.
    """
    arms = {}
    for name, found in scores.items():
        block: dict[str, Any] = found.blocks()
        block["walked_and_decoded"] = {key: list(pair) for key, pair in agreement(found).items()}
        if name in made:
            block["training"] = _training(made[name])
        arms[name] = block
    others = [name for name in scores if name != first and name not in apart]
    return {
        "first": first,
        "arms": arms,
        "times": {name: _times(scores[first], scores[name]) for name in others} if first in scores else {},
        "versions": {name: version(name) for name in VERSIONS} | {"python": platform.python_version()},
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, {platform.system()}",
        "command": " ".join(["headstart compare", *sys.argv[2:]]),
    }


def _training(made: Taught) -> dict[str, Any]:
    names = ("steps", "tokens", "seconds", "peak_bytes", "command", "versions")
    return {name: getattr(made, name) for name in names} | {
        "heads": str(made.heads),
        "curve": [[step, loss, list(accuracy)] for step, loss, accuracy in made.curve],
    }


def _times(ours: Score, theirs: Score) -> dict[str, Any]:
    """Accepted drafts a round (τ - 1), loop-free, of ours over theirs, with 95% over paired prompts."""
    pairs = [(name, stats, theirs.greedy[name]) for name, stats in ours.greedy.items()]
    pairs += [(name, stats, theirs.decoded[name]) for name, stats in ours.decoded.items()]
    return {name: times(one, other)._asdict() for name, one, other in pairs if len(one) == len(other)}


def table(report: Mapping[str, Any]) -> str:
    """Markdown, which a terminal shows as well."""
    columns = list(next(iter(report["arms"].values()))["decoded"])
    lines = ["| τ, loop-free [95% over prompts] | " + " | ".join(columns) + " | tokens seen | seconds |"]
    lines.append("|---" * (len(columns) + 3) + "|")
    for name, arm in report["arms"].items():
        cells = [_interval(arm["decoded"][column]["loop_free_tokens_per_round"]) for column in columns]
        trained = arm.get("training") or {}
        cells += [_number(trained.get("tokens")), _number(trained.get("seconds"))]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    if report["times"]:
        lines += ["", f"| accepted drafts a round: {report['first']} over | " + " | ".join(columns) + " |"]
        lines.append("|---" * (len(columns) + 1) + "|")
        for name, ratios in report["times"].items():
            lines.append(f"| {name} | " + " | ".join(_interval(ratios[column]) for column in columns) + " |")
    return "\n".join(lines)


def _interval(figure: Mapping[str, float]) -> str:
    return f"{figure['value']:.2f} [{figure['low']:.2f}, {figure['high']:.2f}]"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"
