"""What drafts would gain on this machine: cost curve, best look-ahead, break-even acceptance, and a plain sentence.

Everything but the acceptance is measured. Without heads it is assumed, the same at each place and whatever came before
(α, α², …); what a draft costs is then read from untrained heads, which take as long as trained ones. With heads it is
measured by a short decode. The speed-up of B texts under a budget of N rows is

    E[tokens] · t_B(1) / (d_B + t_B(N))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from torch import Tensor

from heads.grow import Budget
from heads.target import Target
from infer.costs import ROWS, measure_batches, measure_costs
from infer.drafters import Drafter
from infer.lookahead import PLAIN, Acceptance, CostTable, candidates

Chain = Callable[[int], Budget]

STEPS = 1000  # of acceptance, in looking for where drafting begins to pay
WORTH = 1.1  # a gain below this is not worth training for


def measure(
    target: Target,
    drafter: Drafter,
    ids: Tensor,
    batches: Sequence[int],
    *,
    depth: int | None = None,
    rows: Sequence[int] = ROWS,
    repeats: int = 5,
) -> CostTable:
    """Costs of passes by rows and batch and of drafts, behind the prompt ``ids`` (1, n).

    Raises:
        ValueError: the target has too few positions for the rounds to time.
    """
    costs = measure_costs(target, drafter, ids, depth=depth, rows=rows, repeats=repeats)
    more = [batch for batch in sorted(set(batches)) if batch > 1]
    taps = tuple(drafter.taps)
    return replace(costs, batches=measure_batches(target, ids, more, rows=rows, taps=taps, repeats=repeats))


def geometric(acceptance: float, depth: int) -> Acceptance:
    """Every drafted token accepted with the same probability, given those before it."""
    return Acceptance(joint=tuple(accumulate([acceptance] * depth, lambda a, b: a * b)))


def speedups(costs: CostTable, joint: Sequence[float], batch: int, chain: Chain = Budget.chain) -> list[float]:
    """Speed-up of chains over plain decoding, by depth from 0.

    Args:
        joint: by depth, P(the drafts so far all hold).
        chain: the budget of a depth.
    """
    tokens = accumulate(joint, initial=1.0)
    plain = costs.round(PLAIN, batch)
    return [total * plain / costs.round(chain(depth), batch) for depth, total in enumerate(tokens)]


def break_even(costs: CostTable, depth: int, batch: int, chain: Chain = Budget.chain) -> float | None:
    """The acceptance from which the best chain beats plain decoding; None where even perfect drafts do not."""
    for step in range(STEPS + 1):
        if max(speedups(costs, geometric(step / STEPS, depth).joint, batch, chain)) > 1:
            return step / STEPS
    return None


def plan(
    target: Target,
    costs: CostTable,
    batches: Sequence[int],
    depth: int,
    *,
    assumed: Sequence[float] = (0.6,),
    measured: Acceptance | None = None,
    chain: Chain = Budget.chain,
) -> dict[str, Any]:
    """Work out the plan from costs and acceptance.

    Args:
        target: only its name is used.
        costs: see :func:`measure`.
        batches: texts decoded together.
        depth: deepest chain to consider.
        assumed: acceptances to show; the first is what the sentence is about when nothing was measured.
        measured: acceptance of heads that are there.
        chain: the budget of a depth, for heads whose drafts take rows of their own.

    Returns:
        A report of plain values.
    """
    batches = sorted(set(batches))
    curve = {
        str(batch): {str(n): costs.target(n, batch) / costs.target(1, batch) for n in sorted(costs.rows)}
        for batch in batches
    }
    chains = {f"{alpha:g}": geometric(alpha, depth) for alpha in assumed}
    if measured is not None:
        chains = {"measured": measured} | chains
    by_depth = {
        name: {str(batch): speedups(costs, acceptance.joint, batch, chain) for batch in batches}
        for name, acceptance in chains.items()
    }
    report = {
        "target": target.name,
        "settings": dict(costs.settings),
        "context": costs.context,
        "costs": costs.to_dict(),
        "curve": curve,
        "draft": {str(k): costs.draft(k, 1) / costs.target(1) for k in range(1, depth + 1)},
        "acceptance": {name: list(acceptance.joint) for name, acceptance in chains.items()},
        "by_depth": by_depth,
        "best": {
            name: {str(batch): _best(costs, acceptance, batch, chain) for batch in batches}
            for name, acceptance in chains.items()
        },
        "break_even": {str(batch): break_even(costs, depth, batch, chain) for batch in batches},
    }
    return report | {"advice": advice(report)}


def _best(costs: CostTable, acceptance: Acceptance, batch: int, chain: Chain) -> dict[str, Any]:
    best = candidates(costs, acceptance, batch=batch, chain=chain)[0]
    return {
        "name": best.name,
        "rows": best.budget.rows,
        "depth": best.budget.depth,
        "tokens_per_round": best.tokens,
        "speedup": best.speed * costs.round(PLAIN, batch),
    }


def advice(report: Mapping[str, Any]) -> str:
    """A plain sentence on whether to train heads, or to use those that were measured."""
    first = next(iter(report["best"]))
    have = first == "measured"
    batches = list(report["break_even"])
    smallest = batches[0]
    texts = "one text" if smallest == "1" else f"{smallest} texts at once"
    best, even = report["best"][first][smallest], report["break_even"][smallest]
    at = "with the acceptance measured" if have else f"with {float(first):.0%} of drafted tokens accepted"
    if even is None:
        said = f"Do not draft for {texts} on this machine: even drafts that are always right would not pay."
    elif best["speedup"] >= WORTH:
        verb = "Use these heads" if have else "Train heads"
        said = f"{verb}: {at}, {texts} should decode {best['speedup']:.2f} times as fast ({best['name']})"
        said += f"; below {even:.0%} drafting would not pay."
    else:
        verb = "These heads hardly pay" if have else "Heads would hardly pay"
        said = f"{verb}: {at}, {texts} should decode {best['speedup']:.2f} times as fast; break-even is {even:.0%}."
    turn = _turn(report["best"][first])
    if turn is not None and turn != smallest:
        said += f" From {turn} texts at once on, plain decoding is as fast."
    return said


def _turn(best: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The batch from which on nothing is gained."""
    turn: str | None = None
    for batch in reversed(list(best)):
        if best[batch]["depth"] > 0:
            break
        turn = batch
    return turn


def table(report: Mapping[str, Any]) -> str:
    """The report for people."""
    at = report["settings"]
    batches = list(report["curve"])
    rows = list(next(iter(report["curve"].values())))
    lines = [
        f"{report['target']} ({at['dtype']}, {at['device']}, {at['threads']} threads), {report['context']} tokens of "
        "context",
        "",
        f"{'a pass over rows / over 1':<28}" + "".join(f"{n:>8}" for n in rows) + f"{'ms for 1':>10}",
    ]
    for batch in batches:
        figures = "".join(f"{report['curve'][batch][n]:>8.2f}" for n in rows)
        one = CostTable.from_dict(report["costs"]).target(1, int(batch))
        lines.append(f"{'batch ' + batch:<28}{figures}{1e3 * one:>10.1f}")
    draft = report["draft"]
    lines += [
        "",
        f"{'draft of K / a pass over 1':<28}" + "".join(f"{'K=' + k:>8}" for k in draft),
        f"{'one text':<28}" + "".join(f"{cost:>8.2f}" for cost in draft.values()),
        "",
        f"{'best draft':<28}" + "".join(f"{'batch ' + batch:>24}" for batch in batches),
    ]
    for name, best in report["best"].items():
        cells = (f"{best[batch]['name']} ×{best[batch]['speedup']:.2f}" for batch in batches)
        label = "acceptance measured" if name == "measured" else f"acceptance {name}"
        lines.append(f"{label:<28}" + "".join(f"{cell:>24}" for cell in cells))
    evens = (report["break_even"][batch] for batch in batches)
    lines += [
        f"{'break-even acceptance':<28}" + "".join(f"{'never' if e is None else f'{e:.2f}':>24}" for e in evens),
        "",
        report["advice"],
    ]
    return "\n".join(lines)
