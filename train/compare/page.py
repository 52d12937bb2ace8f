"""A comparison for people: tables in Markdown, which a terminal shows as well, and the page around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def tables(report: Mapping[str, Any]) -> str:
    """What was accepted, how many times as much that is, by category, and at which rates."""
    parts = (_scores, _prices, _times, _equal_time, _by_category, _rates, _checks, _own)
    made = [part(report) for part in parts]
    return "\n\n".join("\n".join(part) for part in made if part)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]


def _scores(report: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, arm in report["arms"].items():
        cells = [_interval(block(arm, column)["loop_free_tokens_per_round"]) for column in report["columns"]]
        trained = arm.get("training") or {}
        rows.append([name, *cells, *(number(trained.get(what)) for what in ("tokens", "seconds", "states"))])
    head = ["τ, loop-free [95% over prompts]", *report["columns"], "tokens seen", "seconds of training"]
    return _table([*head, "seconds of states before it"], rows)


def block(arm: Mapping[str, Any], column: str) -> Mapping[str, Any]:
    """An arm's figures under a column ("tree 32, T=0")."""
    budget, _, heat = column.partition(", T=")
    found: Mapping[str, Any] = arm["greedy"][budget] if float(heat) == 0 else arm["decoded"][f"{budget} T={heat}"]
    return found


def _prices(report: Mapping[str, Any]) -> list[str]:
    """Weights and times, and the speed that they allow."""
    names = report["decoded"]
    rows = []
    for name, arm in report["arms"].items():
        if "price" not in arm:
            continue
        cost = arm["price"]
        shares = [f"{cost[what][budget]:.2f}" for what in ("draft", "pass") for budget in names]
        speeds = [f"{cost['speedup'][column]:.2f}" for column in report["columns"]]
        rows.append([name, f"{cost['parameters'] / 1e6:.1f} M", f"{cost['passes']}", *shares, *speeds])
    head = ["in plain passes of the target", "parameters", "passes a chain"]
    head += [f"draft, {budget}" for budget in names] + [f"target's pass, {budget}" for budget in names]
    return _table([*head, *(f"speed-up at most, {column}" for column in report["columns"])], rows) if rows else []


def _times(report: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, ratios in report["times"].items():
        asked = report["at_least"].get(name)
        cells = [_interval(ratios[column]) for column in report["columns"]]
        if asked:
            met = asked["met"]
            marks = ("yes" if met[column] else "NO" for column in report["columns"])
            cells = [f"{cell} {mark}" for cell, mark in zip(cells, marks, strict=True)]
        rows.append([name, *cells, f"{asked['least']:g} times" if asked else ""])
    head = [f"accepted drafts a round: {report['first']} over", *report["columns"], "asked"]
    return _table(head, rows) if rows else []


def _equal_time(report: Mapping[str, Any]) -> list[str]:
    each = report["times_of_equal_time"].items()
    rows = [[name, *(_interval(ratios[column]) for column in report["columns"])] for name, ratios in each]
    head = [f"accepted drafts a round: {report['first_of_equal_time']} over", *report["columns"]]
    return _table(head, rows) if rows else []


def _by_category(report: Mapping[str, Any]) -> list[str]:
    column = report["columns"][len(report["decoded"]) - 1]  # the last budget at the first temperature
    trained = {name: arm["by_category"][column] for name, arm in report["arms"].items()}
    categories = list(next(iter(trained.values())))
    if len(categories) < 2:
        return []
    rows = [
        [category, *(f"{found[category]['value']:.2f}" if category in found else "" for found in trained.values())]
        for category in categories
    ]
    return _table([f"τ by category, {column}", *trained], rows)


def _rates(report: Mapping[str, Any]) -> list[str]:
    rows = [
        [name, f"{one['rate']:g}", f"{one['accepted']:.3f}", _choice(one, arm["rates"])]
        for name, arm in report["arms"].items()
        for one in arm.get("rates", ())
    ]
    return _table(["arm", "learning rate", "accepted drafts a round, prompts apart", ""], rows) if rows else []


def _choice(one: Mapping[str, Any], tried: Sequence[Mapping[str, Any]]) -> str:
    """At the edge of what was tried a still better rate may lie beyond it, which a reader should know."""
    if not one["chosen"]:
        return ""
    rates = [other["rate"] for other in tried]
    edges = {min(rates): "chosen, the lowest tried", max(rates): "chosen, the highest tried"}
    return edges.get(one["rate"], "chosen")


def _checks(report: Mapping[str, Any]) -> list[str]:
    rows = [
        [name, budget, f"{walked:.3f}", f"{real:.3f}"]
        for name, arm in report["arms"].items()
        for budget, (walked, real) in arm["walked_and_decoded"].items()
    ]
    return _table(["arm", "greedy, the checked prompts", "τ walked", "τ really decoded"], rows) if rows else []


def _own(report: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, arm in report["arms"].items():
        if own := arm.get("own_engine"):
            theirs, ours = own["chain 7"]["loop_free_tokens_per_round"], arm["greedy"]["chain 7"]
            rows.append([name, _interval(theirs), _interval(ours["loop_free_tokens_per_round"])])
    return _table(["greedy chains of 7", "τ, decoded by its own engine", "τ, decoded by ours"], rows) if rows else []


def _interval(figure: Mapping[str, float]) -> str:
    return f"{figure['value']:.2f} [{figure['low']:.2f}, {figure['high']:.2f}]"


def number(value: float | None) -> str:
    """With commas; nothing where it is not known."""
    return "" if value is None else f"{value:,.0f}"


def page(title: str, report: Mapping[str, Any], shown: str) -> str:
    """README.md of the folder."""
    commands = [report["command"]]
    for arm in report["arms"].values():
        tried = arm.get("rates") or [arm.get("training") or {}]
        commands += [one["command"] for one in tried if one.get("command")]
    pictures = "\n".join(f"![{name}]({name})" for name in report["pictures"])
    versions = ", ".join(f"{name} {value}" for name, value in report["versions"].items())
    return (
        f"# {title}\n\n"
        f"Target {report['target']} in {report['dtype']}; {len(report['prompts'])} held-out prompts, at most "
        f"{report['max_new_tokens']} new tokens each; {report['machine']}. Seeds: {report['train_seed']} of training, "
        f"{report['seed']} of sampling. {versions}.\n\n"
        "τ: tokens per round, the target's own included, the prefill's left out, rounds inside loops of the text left "
        "out. A chain of K drafts takes K + 1 rows of the target's pass, a tree as many as it is named for. Times are "
        "of this machine, and the speed-up they allow leaves out the loop's own. Greedy figures are walked along the "
        "target's text and really decoded on the checked prompts; sampled ones are really decoded on all.\n\n"
        f"{shown}\n\n{pictures}\n\n"
        "The first command makes all of this; what stands below it is what it ran, each arm by itself.\n\n"
        "```bash\n" + "\n".join(commands) + "\n```\n"
    )
