"""Acceptance along a text: tokens per round by how far into its output a round begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from infer.metrics import Round, Stats

FIRST = 64  # output tokens in the first stretch; each further one reaches twice as far


def along(stats: Sequence[Stats]) -> list[dict[str, Any]]:
    """A row a stretch of output positions, counts of all outputs pooled.

    Args:
        stats: each of one output.

    Returns:
        ``from`` and ``to`` (not included) in output tokens, ``rounds`` that begin there and their ``tokens``, with
        ``tokens_per_round``; the same without looped rounds under ``loop_free_rounds``, ``loop_free_tokens`` and
        ``loop_free_tokens_per_round``, which is None where all of them loop. A stretch without rounds is left out.
    """
    found: dict[int, list[Round]] = {}
    for each in stats:
        at = 1  # the prefill's token
        for done in each.log:
            found.setdefault((at // FIRST).bit_length(), []).append(done)
            at += done.emitted
    return [
        {"from": FIRST * (1 << place) // 2 if place else 0, "to": FIRST * (1 << place)}
        | _counts("", log)
        | _counts("loop_free_", [done for done in log if not done.looped])
        for place, log in sorted(found.items())
    ]


def _counts(prefix: str, log: Sequence[Round]) -> dict[str, Any]:
    tokens = sum(done.emitted for done in log)
    return {
        f"{prefix}rounds": len(log),
        f"{prefix}tokens": tokens,
        f"{prefix}tokens_per_round": tokens / len(log) if log else None,
    }


def lines(budgets: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """For people: a row a stretch and a column a budget; nothing where all outputs end in the first stretch."""
    places = sorted({(row["from"], row["to"]) for block in budgets.values() for row in block["by_output_position"]})
    if len(places) < 2:
        return []
    made = [f"{'τ loop-free by position':<26}{'rounds':>8}" + "".join(f"{name:>18}" for name in budgets)]
    for begin, end in places:
        rows = [
            next((row for row in block["by_output_position"] if row["from"] == begin), None)
            for block in budgets.values()
        ]
        figures = [None if row is None else row["loop_free_tokens_per_round"] for row in rows]
        rounds = rows[0]["loop_free_rounds"] if rows[0] else 0
        made.append(
            f"{f'{begin} to {end - 1}':<26}{rounds:>8}"
            + "".join(f"{'-' if figure is None else format(figure, '.2f'):>18}" for figure in figures)
        )
    return made
