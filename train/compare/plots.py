"""A comparison in pictures: tokens per round by budget, acceptance by position, and the curves of the trainings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from infer.plot import COLOURS, drawable
from train.compare.score import ITSELF, LOOKUP, NOTHING

Draw = Callable[[Any, Mapping[str, Any]], None]
MARKERS = ("o", "s", "^", "D", "v")


def draw(report: Mapping[str, Any], folder: Path) -> list[str]:
    """Write the pictures as PNG into ``folder``; returns their names.

    Raises:
        ValueError: matplotlib is not installed.
    """
    FigureCanvasAgg, Figure = drawable()
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


def looks(arms: Iterable[str]) -> dict[str, dict[str, str]]:
    """Colour and marker by arm, no two alike, controls in grey.

    The control that is always right is left to the table: beside it all others would lie flat.
    """
    arms = list(arms)
    own = [name for name in arms if name not in (NOTHING, LOOKUP, ITSELF)]
    bright = COLOURS[:-1]  # the last is a grey
    found = {
        name: {"color": bright[place % len(bright)], "marker": MARKERS[place // len(bright) % len(MARKERS)]}
        for place, name in enumerate(own)
    }
    greys = {NOTHING: {"color": "#b0b0b0", "marker": "."}, LOOKUP: {"color": "#555555", "marker": "x"}}
    return found | {name: look for name, look in greys.items() if name in arms}


def _by_budget(axes: Any, report: Mapping[str, Any]) -> None:
    for name, look in looks(report["arms"]).items():
        greedy = report["arms"][name]["greedy"]
        for kind, style in (("tree", "-"), ("chain", ":")):
            rows = {int(key.split()[1]) + (kind == "chain"): block for key, block in greedy.items() if kind in key}
            taus = [block["loop_free_tokens_per_round"]["value"] for block in rows.values()]
            label = name if kind == "tree" else None
            axes.plot(list(rows), taus, style, markersize=3, label=label, **look)
    axes.set_xscale("log", base=2)
    ticks = [2, 4, 8, 16, 32, 64]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("rows of the target's pass (trees drawn through, chains dotted)")
    axes.set_ylabel("tokens per round, greedy, loop-free")


def _by_position(axes: Any, report: Mapping[str, Any]) -> None:
    for name, look in looks(report["arms"]).items():
        chains = [key for key in report["arms"][name]["greedy"] if key.startswith("chain")]
        accepted = report["arms"][name]["greedy"][chains[-1]]["loop_free_accepted_per_position"]
        axes.plot(range(1, len(accepted) + 1), accepted, markersize=4, label=name, **look)
    axes.set_ylim(0, 1)
    axes.set_xlabel("position in the draft (a chain)")
    axes.set_ylabel("share of rounds that accept it and all before it")


def _curves(axes: Any, report: Mapping[str, Any]) -> None:
    """Of every rate that was tried; the chosen one's is thick and has the label."""
    for name, look in looks(report["arms"]).items():
        arm = report["arms"][name]
        for one in arm.get("rates") or [{**(arm.get("training") or {}), "chosen": True}]:
            points = [(step, accuracy[0]) for step, _, accuracy in one.get("curve") or [] if accuracy]
            if not points:
                continue
            width = max(1, len(points) // 40)  # peers tell of every step
            means = [points[at : at + width] for at in range(0, len(points), width)]
            label = f"{name} {one['rate']:g}" if "rate" in one else name
            line = {"label": label, "linewidth": 1.8} if one["chosen"] else {"linewidth": 0.8, "alpha": 0.6}
            right = [sum(value for _, value in part) / len(part) for part in means]
            axes.plot([part[-1][0] for part in means], right, color=look["color"], **line)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("first drafted token right, in training, as each counts it\n(thin: other learning rates)")


PLOTS: dict[str, Draw] = {
    "tokens_by_budget.png": _by_budget,
    "accepted_by_position.png": _by_position,
    "training.png": _curves,
}
