"""Ablations for people: a table for each question, what each change was worth, and the picture of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infer.metrics import pooled
from infer.paired import times
from infer.plot import COLOURS, drawable
from train.compare.ablation_plan import Group, Run
from train.compare.arms import Taught
from train.compare.page import number
from train.compare.report import training
from train.compare.score import DECODED, Score


def results(group: Group, found: Sequence[tuple[Run, Taught, Score]], missing: Sequence[str]) -> dict[str, Any]:
    """A group's figures, plain: accepted drafts a round, and how many times the first run's, over paired prompts."""
    rows = []
    for run, done, score in found:
        first = found[0][2]
        budgets = {}
        for budget in DECODED:
            value, low, high = pooled(score.greedy[budget], without_loops=True)
            ratio = times(score.greedy[budget], first.greedy[budget])
            budgets[budget] = {
                "accepted": {"value": value - 1, "low": low - 1, "high": high - 1},
                "times": ratio._asdict(),
            }
        rows.append({"name": run.name, "at": run.at, **training(done), "budgets": budgets})
    return {"name": group.name, "asks": group.asks, "axis": group.axis, "missing": list(missing), "runs": rows}


def verdict(run: Mapping[str, Any]) -> str:
    """What the prompts say of a run against the first: only what both budgets do not contradict, and one is sure of."""
    each = [run["budgets"][budget]["times"] for budget in DECODED]
    if any(one["high"] < 1 for one in each) and not any(one["low"] > 1 for one in each):
        return "worse"
    if any(one["low"] > 1 for one in each) and not any(one["high"] < 1 for one in each):
        return "better"
    return "cannot be told apart"


def tables(report: Mapping[str, Any]) -> str:
    """Markdown."""
    parts = []
    for group in report["groups"]:
        lines = [f"### {group['asks']}", ""]
        if group["missing"]:
            lines.append(f"Not run: it needs {', '.join(f'`--data {name}=FILE`' for name in group['missing'])}.")
            parts.append("\n".join(lines))
            continue
        head = [group["name"], "steps", "tokens", "seconds"]
        head += [f"accepted a round, {budget}" for budget in DECODED]
        head += [f"times the first, {budget}" for budget in DECODED] + ["so it is"]
        lines += [_row(head), _row(["---"] * len(head))]
        for place, run in enumerate(group["runs"]):
            cells = [run["name"], f"{run['steps']:,}", f"{run['tokens']:,}", number(run["seconds"])]
            cells += [_interval(run["budgets"][budget]["accepted"]) for budget in DECODED]
            ratios = [_interval(run["budgets"][budget]["times"]) for budget in DECODED]
            lines.append(_row([*cells, *(ratios if place else ["", ""]), verdict(run) if place else "the first"]))
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _interval(figure: Mapping[str, float]) -> str:
    return f"{figure['value']:.2f} [{figure['low']:.2f}, {figure['high']:.2f}]"


def page(report: Mapping[str, Any]) -> str:
    """README.md of the folder."""
    long = f"about {report['minutes']:g} minutes" if report["minutes"] else "the same number of steps"
    return (
        "# What each choice is worth\n\n"
        f"Target {report['target']} in {report['dtype']}; {len(report['prompts'])} held-out prompts, at most "
        f"{report['max_new_tokens']} new tokens each, greedy; training seed {report['seed']}. Each run was trained for "
        f"{long} (equal {report['equal']}), with one thing changed. Accepted drafts a round are τ - 1 without loops, "
        "walked along the target's own text, with 95% over prompts; ratios are over the same prompts. All is of one "
        "training each: what another seed would change is in no interval.\n\n"
        f"{tables(report)}\n\n![ablations.png](ablations.png)\n\n```bash\n{report['command']}\n```\n"
    )


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Each group in a panel: points with intervals, or the trend where it has an axis.

    Raises:
        ValueError: matplotlib is not installed.
    """
    FigureCanvasAgg, Figure = drawable()
    groups = [group for group in report["groups"] if group["runs"]]
    wide = 2 if len(groups) > 1 else 1
    high = max(1, -(-len(groups) // wide))
    figure = Figure(figsize=(6.4 * wide, 2.9 * high), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(high, wide, squeeze=False).flatten()
    for panel in panels[len(groups) :]:
        panel.set_visible(False)
    for panel, group in zip(panels, groups, strict=False):
        for budget, colour in zip(DECODED, COLOURS, strict=False):
            (_trend if group["axis"] else _points)(panel, group, budget, colour)
        panel.set_title(group["asks"], fontsize=9)
        panel.grid(alpha=0.3)
        panel.legend(frameon=False, fontsize=7)
    figure.savefig(path, format="png", dpi=130)


def _bars(group: Mapping[str, Any], budget: str) -> tuple[list[float], list[list[float]]]:
    each = [run["budgets"][budget]["accepted"] for run in group["runs"]]
    below = [one["value"] - one["low"] for one in each]
    return [one["value"] for one in each], [below, [one["high"] - one["value"] for one in each]]


def _points(panel: Any, group: Mapping[str, Any], budget: str, colour: str) -> None:
    values, bars = _bars(group, budget)
    shift = 0.12 * (1 - 2 * DECODED.index(budget))
    places = [len(values) - 1 - place + shift for place in range(len(values))]
    panel.errorbar(values, places, xerr=bars, fmt="o", markersize=4, capsize=2, color=colour, label=budget)
    panel.axvline(values[0], color=colour, linewidth=0.6, alpha=0.5)
    panel.set_yticks(range(len(values)), [run["name"] for run in reversed(group["runs"])], fontsize=7)
    panel.set_xlabel("accepted drafts a round", fontsize=8)


def _trend(panel: Any, group: Mapping[str, Any], budget: str, colour: str) -> None:
    values, bars = _bars(group, budget)
    places = [run["at"] for run in group["runs"]]
    panel.errorbar(places, values, yerr=bars, fmt="o", markersize=4, capsize=2, color=colour, label=budget)
    order = sorted(range(len(places)), key=places.__getitem__)
    panel.plot([places[at] for at in order], [values[at] for at in order], color=colour, linewidth=1)
    panel.set_xscale("log", base=2)
    panel.set_xticks(sorted(places), [f"{place:g}" for place in sorted(places)], fontsize=7)
    panel.set_xlabel(group["axis"], fontsize=8)
    panel.set_ylabel("accepted drafts a round", fontsize=8)
