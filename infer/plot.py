"""The plan as a picture: what a pass over more rows costs, and what look-ahead gains, by batch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

COLOURS = ("#1b6ca8", "#d9822b", "#3a923a", "#b03a48", "#7b5ea7", "#6b6b6b")


def drawable(otherwise: str = "") -> tuple[Any, Any]:
    """matplotlib's canvas and figure; asked for before hours of work, too.

    Args:
        otherwise: what to do without, for the message.

    Raises:
        ValueError: it is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(f"pictures need matplotlib: run `pip install -e '.[plot]'` in the clone{otherwise}") from None
    return FigureCanvasAgg, Figure


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Write the picture of a plan (``infer.plan.plan``) as PNG.

    Raises:
        ValueError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    FigureCanvasAgg, Figure = drawable(", or leave --png out")
    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    costs, gains = figure.subplots(1, 2)
    name, by_batch = next(iter(report["by_depth"].items()))
    for (batch, curve), colour in zip(report["curve"].items(), COLOURS * len(report["curve"]), strict=False):
        label = f"batch {batch}"
        costs.plot([int(n) for n in curve], list(curve.values()), marker="o", color=colour, label=label)
        speedups = by_batch[batch]
        gains.plot(range(len(speedups)), speedups, marker="o", color=colour, label=label)
        best = max(range(len(speedups)), key=speedups.__getitem__)
        gains.plot(best, speedups[best], marker="o", markersize=12, fillstyle="none", color=colour)
    rows = [int(n) for n in next(iter(report["curve"].values()))]
    costs.set_xscale("log", base=2)
    costs.set_xticks(rows, [str(n) for n in rows])
    costs.set_xlabel("rows of each text in a pass of the target")
    costs.set_ylabel("time of the pass, one row each = 1")
    costs.set_title("What a pass over more rows costs")
    gains.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    gains.set_xticks(range(len(next(iter(by_batch.values())))))
    gains.set_xlabel("look-ahead K (0: plain decoding)")
    gains.set_ylabel("speed-up over plain decoding")
    gains.set_title("What drafting gains, acceptance " + ("as measured" if name == "measured" else name))
    at = report["settings"]
    figure.suptitle(f"{report['target']} ({at['dtype']}, {at['device']}, {at['threads']} threads)", fontsize=10)
    for axes in (costs, gains):
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
    partial = path.with_name(f".{path.name}.tmp")
    try:
        figure.savefig(partial, format="png", dpi=130)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
