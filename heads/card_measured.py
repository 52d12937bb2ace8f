"""Sections of the card with figures: acceptance by position and by task, speed with its machine, the certificate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from heads.plots import PICTURES
from heads.reports import as_written

FIGURES = {
    "tokens_per_round": "tokens per round (the target's own token included)",
    "tokens_per_round_tree": "tokens per round, tree drafts",
    "speedup": "speed-up over plain decoding, same machine and run",
    "greedy_identical": "greedy output identical to the target's",
    "prompts": "held-out prompts",
}
# single figures that a whole report says better
WITHIN = {
    "evaluation": ("tokens_per_round", "tokens_per_round_tree", "accepted_per_position", "prompts"),
    "bench": ("speedup",),
}


def measured(report: Mapping[str, Any]) -> str:
    """Acceptance and speed, as the reports have them; empty where nothing was measured."""
    within = {key for part, keys in WITHIN.items() if report.get(part) for key in keys}
    report = {key: value for key, value in report.items() if key not in within}
    rows = {label: report[key] for key, label in FIGURES.items() if report.get(key) is not None}
    parts = [table("Measured", rows)] if rows else []
    joint = report.get("accepted_per_position")
    for name, values in joint.items() if isinstance(joint, Mapping) else [("", joint)]:
        if isinstance(values, Sequence) and len(values):
            title = f"Acceptance by draft position{f', {name}' if name else ''}:"
            with as_written("accepted_per_position"):
                parts.append(f"{title}\n\n{_positions([('accepted up to here', values)])}")
    for part, make in PARTS.items():
        if report.get(part):
            with as_written(part):
                parts.append(make(report[part]))
    if parts and not rows:
        parts.insert(0, "## Measured")
    return "\n\n".join(parts)


def _acceptance(evaluation: Mapping[str, Any]) -> str:
    """Tokens per round and acceptance by position under each budget, and by task."""
    at, budgets = evaluation["settings"], evaluation["budgets"]
    prompts = f", from {evaluation['prompts']}" if isinstance(evaluation.get("prompts"), str) else ""
    temperature = f"temperature {at['temperature']:g}" if at["temperature"] else "greedy"
    lines = [
        "### Acceptance",
        f"{at['prompts']} held-out prompts{prompts}, up to {at['max_new_tokens']} new tokens, {temperature}, "
        f"{evaluation['dtype']}. Tokens per round: the target's own token included, the prefill's not, with a 95% "
        "interval over prompts; loop-free: without rounds in which the text repeats itself.",
        _rows(
            ("draft", "rows a pass", "rounds", "tokens per round, loop-free", "with loops"),
            [
                (
                    name,
                    block["rows"],
                    block["rounds"],
                    _interval(block["loop_free_tokens_per_round"]),
                    _interval(block["tokens_per_round"]),
                )
                for name, block in budgets.items()
            ],
        ),
        "Accepted up to a draft position, of all rounds:",
        _positions([(name, block["accepted_per_position"]) for name, block in budgets.items()]),
        _picture("acceptance"),
    ]
    tasks = list(next(iter(budgets.values()))["by_category"])
    if len(tasks) > 1:
        rows = []
        for task in tasks:
            blocks = [block["by_category"][task] for block in budgets.values()]
            figures = [f"{block['loop_free_tokens_per_round']['value']:.2f}" for block in blocks]
            rows.append((task, blocks[0]["prompts"], *figures))
        lines += [
            "By task, tokens per round, loop-free:",
            _rows(("task", "prompts", *budgets), rows),
            _picture("tasks"),
        ]
    return "\n\n".join(lines)


def _speed(bench: Mapping[str, Any]) -> str:
    at, draft = bench["settings"], bench["budget"]
    machine = ", ".join(str(at[key]) for key in ("machine", "device") if at.get(key))
    shape = f"a draft of {draft['rows'] - 1} tokens, {draft['depth']} deep" if draft["depth"] else "no draft at all"
    return "\n\n".join(
        [
            "### Speed",
            f"{at['prompts']} prompts, up to {at['max_new_tokens']} new tokens, {at['decoding']}, {at['dtype']} on "
            f"{machine}, {at['threads']} threads, {at['order']} in one process, with {shape}. Speed-up over the faster "
            f"baseline ({bench['baseline']}): **{bench['speedup']:.2f}** (median over prompts, loop-free), "
            f"{bench['speedups']['median']:.2f} with loops.",
            _rows(
                ("", "tokens/s", "without loops", "to the first token, ms"),
                [
                    (
                        name,
                        f"{arm['tokens_per_second']:.1f}",
                        f"{arm['tokens_per_second_loop_free']:.1f}",
                        f"{1e3 * arm['ttft_seconds']['p50']:.0f}",
                    )
                    for name, arm in bench["arms"].items()
                ],
            ),
            _picture("speed"),
        ]
    )


PARTS = {"evaluation": _acceptance, "bench": _speed}


def certified(certificate: Mapping[str, Any] | None) -> str:
    """What ``headstart verify`` found."""
    if certificate is None:
        return ""
    with as_written("certificate"):
        return _certificate(certificate)


def _certificate(certificate: Mapping[str, Any]) -> str:
    rows = []
    for dtype, block in certificate["greedy"].items():
        near = f"{len(block['differences'])} first differences" if block["differences"] else "no difference"
        bound = f", near-ties under {block['bound']:.2g}" if block["differences"] else ""
        what = f"{block['texts']} texts, {block['positions']} tokens: {near}{bound}"
        rows.append((f"greedy, {dtype}", what, "", _verdict(block["passed"])))
    sampled = certificate["sampled"]
    for name, block in sampled["drafts"].items():
        rows.append((f"sampled, {name}", *_chi_square(block), _verdict(block["passed"])))
    control = sampled["control"]
    refused = "refused, as it must be" if control["failed_as_it_must"] else "**not noticed**"
    rows.append((f"wrong rule on purpose: {control['name']}", *_chi_square(control), refused))
    versions = ", ".join(f"{name} {value}" for name, value in certificate["versions"].items())
    return "\n\n".join(
        [
            "## Certificate",
            f"`headstart verify`: **{'passed' if certificate['passed'] else 'NOT LOSSLESS'}**. Greedy text beside "
            "`model.generate`, differences re-scored and held against the target's own rounding; sampled first rounds "
            "by χ² against the target's law. All of it is in `certificate.json`.",
            _rows(("", "seen", "threshold", "verdict"), rows),
            f"Target's weights sha256 `{certificate['target']['sha256'][:16]}…`, heads "
            f"`{certificate['heads']['sha256'][:16]}…`; {versions}.",
        ]
    )


def _chi_square(block: Mapping[str, Any]) -> tuple[str, str]:
    worst = max(block["tests"], key=lambda test: test["statistic"] / test["limit"] if test["limit"] else 0.0)
    draws = sum(test["draws"] for test in block["tests"])
    return f"χ² {worst['statistic']:.1f} (df {worst['df']}), {draws} tokens", f"{worst['limit']:.1f}"


def _verdict(passed: bool) -> str:
    return "ok" if passed else "**failed**"


def _picture(name: str) -> str:
    return f"![{PICTURES[name][1]}]({PICTURES[name][0]})"


def _positions(rows: Sequence[tuple[str, Sequence[float]]]) -> str:
    deep = max(len(values) for _, values in rows)
    cells = [(name, *(f"{value:.1%}" for value in values), *[""] * (deep - len(values))) for name, values in rows]
    return _rows(("position", *(str(i + 1) for i in range(deep))), cells)


def _interval(figure: Mapping[str, float]) -> str:
    return f"{figure['value']:.2f} [{figure['low']:.2f}, {figure['high']:.2f}]"


def _rows(head: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_text(cell) for cell in line) + " |" for line in lines)


def table(title: str, rows: Mapping[str, Any]) -> str:
    """A section with names and values."""
    return f"## {title}\n\n| | |\n|---|---|\n" + "\n".join(
        f"| {name} | {_text(value)} |" for name, value in rows.items()
    )


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_text(item) for item in value)
    return str(value).replace("|", "\\|").replace("\n", " ")
