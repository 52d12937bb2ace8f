"""A comparison's report: figures of every arm, how many times one is the other, and whether that is what was asked."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch

from infer.evaluate import summary
from infer.paired import times
from train.compare.arms import Taught
from train.compare.rates import Try
from train.compare.score import Score, agreement

VERSIONS = ("headstart", "torch", "transformers", "accelerate", "numpy")


def figures(
    scores: Mapping[str, Score],
    made: Mapping[str, Taught],
    tried: Mapping[str, Sequence[Try]],
    timed: Sequence[str],
    apart: Sequence[str],
    columns: Sequence[str],
) -> dict[str, Any]:
    """Plain values.

    Args:
        scores: by arm, the first being held against the others; controls and those of equal time among them.
        made: arms that have heads.
        tried: learning rates of arms that several were tried for.
        timed: arms of equal time, which are held against each other, not against those of equal tokens.
        apart: controls, which nothing is held against: they say what is possible.
        columns: the figures that count.
    """
    first, threads = next(iter(scores)), torch.get_num_threads()
    arms = {}
    for name, found in scores.items():
        block: dict[str, Any] = found.blocks()
        block["by_category"] = {column: _by_category(found, column) for column in columns}
        block["walked_and_decoded"] = {key: list(pair) for key, pair in agreement(found).items()}
        if name in made:
            block["training"] = training(made[name])
        if len(tried.get(name, ())) > 1:
            block["rates"] = [
                {"rate": one.rate, "accepted": one.worth, "chosen": one.done.heads == made[name].heads}
                | training(one.done)
                for one in tried[name]
            ]
        arms[name] = block
    others = [name for name in scores if name != first and name not in (*apart, *timed)]
    return {
        "first": first,
        "columns": list(columns),
        "arms": arms,
        "times": {name: _times(scores[first], scores[name], columns) for name in others},
        "first_of_equal_time": next(iter(timed), None),
        "times_of_equal_time": {name: _times(scores[timed[0]], scores[name], columns) for name in timed[1:]},
        "versions": {name: version(name) for name in VERSIONS} | {"python": platform.python_version()},
        "machine": f"{platform.machine()}, {threads} thread{'s' * (threads > 1)}, {platform.system()}",
        "command": shlex.join(["headstart", *sys.argv[1:]]),
    }


def training(made: Taught) -> dict[str, Any]:
    """How heads were made."""
    names = ("steps", "tokens", "seconds", "states", "peak_bytes", "command", "versions")
    return {name: getattr(made, name) for name in names} | {
        "heads": str(made.heads),
        "curve": [[step, loss, list(accuracy)] for step, loss, accuracy in made.curve],
    }


def _by_category(found: Score, column: str) -> dict[str, Any]:
    each = found.of(column)
    return {
        category: summary([stats for stats, own in zip(each, found.categories, strict=True) if own == category])[
            "loop_free_tokens_per_round"
        ]
        for category in dict.fromkeys(found.categories)
    }


def _times(ours: Score, theirs: Score, columns: Sequence[str]) -> dict[str, Any]:
    """Accepted drafts a round (τ - 1), loop-free, of ours over theirs, with 95% over paired prompts."""
    pairs = {name: (stats, theirs.greedy[name]) for name, stats in ours.greedy.items()}
    pairs |= {column: (ours.of(column), theirs.of(column)) for column in columns}
    return {name: times(one, other)._asdict() for name, (one, other) in pairs.items()}


def held(report: Mapping[str, Any], wanted: Mapping[str, float]) -> dict[str, Any]:
    """Whether the first arm is so many times as good as the arms named, and surely better than each, in every column.

    Raises:
        ValueError: there is no such arm to be held against.
    """
    found = {}
    for name, least in wanted.items():
        if name not in report["times"]:
            known = ", ".join(report["times"]) or "none"
            raise ValueError(f"--at-least {name}={least:g}: arms that the first is held against are {known}")
        ratios = {column: report["times"][name][column] for column in report["columns"]}
        found[name] = {
            "least": least,
            "met": {column: one["value"] >= least and one["low"] > 1 for column, one in ratios.items()},
        }
    return found
