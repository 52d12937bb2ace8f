"""A comparison in pictures: tokens per round by budget, acceptance by position, and the curves of the trainings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from infer.plot import COLOURS

Draw = Callable[[Any, Mapping[str, Any]], None]


def draw(report: Mapping[str, Any], folder: Path) -> list[str]:
    """Write the pictures as PNG into ``folder``; returns their names.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("plots need matplotlib: run `pip install 'headstart[plot]'`") from None
    for name, make in PLOTS.items():
        figure = Figure(figsize=(7.5, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        make(axes, report)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
        figure.savefig(folder / name, format="png", dpi=130)
    return list(PLOTS)


def _colours(report: Mapping[str, Any]) -> dict[str, str]:
    return {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(report["arms"])}


def _by_budget(axes: Any, report: Mapping[str, Any]) -> None:
    for name, colour in _colours(report).items():
        greedy = report["arms"][name]["greedy"]
        for kind, style in (("tree", "-"), ("chain", ":")):
            rows = {int(key.split()[1]) + (kind == "chain"): block for key, block in greedy.items() if kind in key}
            taus = [block["loop_free_tokens_per_round"]["value"] for block in rows.values()]
            label = name if kind == "tree" else None
            axes.plot(list(rows), taus, style, marker="o", markersize=3, color=colour, label=label)
    axes.set_xscale("log", base=2)
    ticks = [2, 4, 8, 16, 32, 64]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("rows of the target's pass (trees drawn through, chains dotted)")
    axes.set_ylabel("tokens per round, greedy, loop-free")


def _by_position(axes: Any, report: Mapping[str, Any]) -> None:
    for name, colour in _colours(report).items():
        chains = [key for key in report["arms"][name]["greedy"] if key.startswith("chain")]
        accepted = report["arms"][name]["greedy"][chains[-1]]["loop_free_accepted_per_position"]
        axes.plot(range(1, len(accepted) + 1), accepted, marker="o", color=colour, label=name)
    axes.set_ylim(0, 1)
    axes.set_xlabel("position in the draft (a chain)")
    axes.set_ylabel("share of rounds that accept it and all before it")


def _curves(axes: Any, report: Mapping[str, Any]) -> None:
    """Of every rate that was tried; the chosen one's is thick and has the label."""
    for name, colour in _colours(report).items():
        arm = report["arms"][name]
        for one in arm.get("rates") or [{**(arm.get("training") or {}), "chosen": True}]:
            points = [(step, accuracy[0]) for step, _, accuracy in one.get("curve") or [] if accuracy]
            if not points:
                continue
            width = max(1, len(points) // 40)  # peers tell of every step
            means = [points[at : at + width] for at in range(0, len(points), width)]
            label = f"{name} {one['rate']:g}" if "rate" in one else name
            look = {"label": label, "linewidth": 1.8} if one["chosen"] else {"linewidth": 0.8, "alpha": 0.6}
            right = [sum(value for _, value in part) / len(part) for part in means]
            axes.plot([part[-1][0] for part in means], right, color=colour, **look)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("first drafted token right, in training, as each counts it\n(thin: other learning rates)")


PLOTS: dict[str, Draw] = {
    "tokens_by_budget.png": _by_budget,
    "accepted_by_position.png": _by_position,
    "training.png": _curves,
}
