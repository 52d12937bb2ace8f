"""Pictures of the card, drawn from the same reports as its tables: acceptance by position, by task, and speed."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

from heads.layout import PLOTS
from heads.reports import as_written

COLOURS = ("#1b6ca8", "#d9822b", "#3a923a", "#b03a48", "#7b5ea7", "#6b6b6b")
# name → file in the repository, what it shows, the part of the report it is drawn from
PICTURES: dict[str, tuple[str, str, str]] = {
    "acceptance": (f"{PLOTS}/acceptance.png", "Acceptance by draft position", "evaluation"),
    "tasks": (f"{PLOTS}/tasks.png", "Tokens per round by task", "evaluation"),
    "speed": (f"{PLOTS}/speed.png", "Tokens per second", "bench"),
}


def plots(report: Mapping[str, Any]) -> dict[str, bytes]:
    """PNG files by their names in the repository, for whatever was measured; the same report gives the same bytes.

    Args:
        report: as :func:`heads.reports.gather` makes it.

    Raises:
        ValueError: there is something to draw and matplotlib is not installed.
    """
    found = {}
    for name, (path, title, part) in PICTURES.items():
        if not report.get(part):
            continue
        with as_written(part):
            worth_it = _worth_it(name, report[part])
        if worth_it:
            found[path] = _drawn(name, report[part], title)
    return found


def _worth_it(name: str, part: Mapping[str, Any]) -> bool:
    return name != "tasks" or len(next(iter(part["budgets"].values()))["by_category"]) > 1


def _drawn(name: str, part: Mapping[str, Any], title: str) -> bytes:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "the card's plots need matplotlib: run `pip install -e '.[plot]'` in the clone, or push with --no-plots "
            "(with_plots=False)"
        ) from None
    figure = Figure(figsize=(7.0, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    with as_written(PICTURES[name][2]):
        DRAW[name](axes, part)
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.3)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=120, metadata={"Software": None})
    return out.getvalue()


def _acceptance(axes: Any, evaluation: Mapping[str, Any]) -> None:
    for (name, block), colour in zip(evaluation["budgets"].items(), COLOURS * 9, strict=False):
        values = block["accepted_per_position"]
        axes.plot(range(1, len(values) + 1), values, marker="o", color=colour, label=name)
    axes.set_xlabel("draft position")
    axes.set_ylabel("rounds accepted up to here")
    axes.set_ylim(0, 1)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)


def _tasks(axes: Any, evaluation: Mapping[str, Any]) -> None:
    budgets = evaluation["budgets"]
    tasks = list(next(iter(budgets.values()))["by_category"])
    height = 0.8 / len(budgets)
    for i, ((name, block), colour) in enumerate(zip(budgets.items(), COLOURS * 9, strict=False)):
        figures = [block["by_category"][task]["loop_free_tokens_per_round"]["value"] for task in tasks]
        places = [place + (i - (len(budgets) - 1) / 2) * height for place in range(len(tasks))]
        axes.barh(places, figures, height=height, color=colour, label=name)
    axes.set_yticks(range(len(tasks)), tasks, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.set_xlabel("tokens per round, loop-free (1: plain decoding)")
    axes.legend(frameon=False, fontsize=8)


def _speed(axes: Any, bench: Mapping[str, Any]) -> None:
    arms = bench["arms"]
    figures = [arm["tokens_per_second_loop_free"] for arm in arms.values()]
    axes.barh(range(len(arms)), figures, color=COLOURS[0], height=0.6)
    axes.set_yticks(range(len(arms)), list(arms), fontsize=9)
    axes.invert_yaxis()
    at = bench["settings"]
    axes.set_xlabel(f"tokens a second, loop-free ({at['dtype']}, {at['device']}, {at['threads']} threads)")


DRAW: dict[str, Callable[[Any, Mapping[str, Any]], None]] = {
    "acceptance": _acceptance,
    "tasks": _tasks,
    "speed": _speed,
}
