"""From runs to the table: the middle of the rounds, the range, and how far the best peer is behind."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from train.peers.contest import Contender, Run


def best(runs: Sequence[Run]) -> int:
    """The batch of the fastest of some trial runs."""
    return max(runs, key=Run.rate).batch


def summarize(runs: Sequence[Run], cached_build: float) -> dict[str, Any]:
    """What is printed and written.

    Args:
        runs: all rounds of all contenders.
        cached_build: seconds that our cache of these conversations took to build.
    """
    contenders: dict[str, Contender] = {run.contender.name: run.contender for run in runs}
    rows = {name: _row([run for run in runs if run.contender.name == name]) for name in contenders}
    peers = [name for name, contender in contenders.items() if not contender.ours]
    ours = [name for name, contender in contenders.items() if contender.ours]
    found: dict[str, Any] = {"trainers": rows, "cache_build_seconds": cached_build, "ratios": {}}
    if peers:
        better = max(peers, key=lambda name: rows[name]["tokens_per_second"])
        found["better_peer"] = better
        found["ratios"] = {name: rows[name]["tokens_per_second"] / rows[better]["tokens_per_second"] for name in ours}
    return found


def _row(runs: list[Run]) -> dict[str, Any]:
    rates = [run.rate() for run in runs]
    return {
        "batch_tokens": runs[0].batch,
        "tokens": sum(step["tokens"] for step in runs[0].timed),
        "supervised": sum(step["supervised"] for step in runs[0].timed),
        "steps": len(runs[0].timed),
        "tokens_per_second": statistics.median(rates),
        "supervised_per_second": statistics.median(run.rate("supervised") for run in runs),
        "rounds": rates,
        "tokens_per_processor_second": statistics.median(run.rate(of="processor") for run in runs),
        "process_seconds": [run.process.seconds for run in runs],
        "processor_seconds": [run.process.processor for run in runs],
        "peak_bytes": max(run.process.peak for run in runs),
        "frozen": runs[0].result["frozen"],
        "versions": runs[0].result["versions"],
    }


def table(report: dict[str, Any]) -> str:
    """For people."""
    lines = [f"{'':24}{'tokens/step':>12}{'tokens/s':>11}{'of the rounds':>18}{'supervised/s':>14}{'peak memory':>14}"]
    for name, row in report["trainers"].items():
        span = f"{min(row['rounds']):,.0f} to {max(row['rounds']):,.0f}"
        lines.append(
            f"{name:24}{row['batch_tokens']:>12,}{row['tokens_per_second']:>11,.0f}{span:>18}"
            f"{row['supervised_per_second']:>14,.0f}{row['peak_bytes'] / 2**30:>10.2f} GiB"
        )
    for name, ratio in report["ratios"].items():
        lines.append(f"{name}: {ratio:.2f} times the better peer ({report['better_peer']})")
    for name, row in report["trainers"].items():
        if row["frozen"]:
            lines.append(f"{name} leaves {', '.join(row['frozen'])} as it is and has that much less to do")
    return "\n".join(lines)


def terms(report: dict[str, Any]) -> str:
    """What is the same for all, as it was checked of each run."""
    made = report["made"]
    draft, weights = made["weights"]["lm_head.weight"][0], sum(math.prod(shape) for shape in made["weights"].values())
    return (
        f"all alike: {report['conversations']} conversations, {report['tokens']:,} tokens, {report['supervised']:,} of "
        f"them supervised; EAGLE-3 of {weights / 1e6:.2f}M weights in {'/'.join(made['dtypes'])} under precision "
        f"{made['precision']}, taps {made['taps']}, unroll depth {made['lookahead']}, draft vocabulary {draft:,}; "
        f"{report['threads']} threads; each at the best of the batch sizes that were tried or named"
    )
