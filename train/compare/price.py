"""What heads cost beside the target: their weights, passes one after another, the clock; and the speed that allows.

With τ tokens a round, a draft of d and a pass over N rows of t(N) seconds, decoding is at most ``τ·t(1) / (d + t(N))``
times as fast as one token a pass: the loop's own time is in none of them (infer/costs.py says how they are timed).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from heads.base import DraftHeads
from heads.grow import Budget
from heads.target import Target
from infer.costs import measure_costs
from infer.drafters import HeadsDrafter
from infer.drafters.inside import inside_of
from infer.evaluate import TREE_WIDTH
from infer.lookahead import PLAIN
from train.compare.score import every_budget


def price(target: Target, heads: DraftHeads, deepest: int, ids: Tensor, decoded: Sequence[str]) -> dict[str, Any]:
    """Plain values, times as shares of the target's pass over one row.

    Args:
        deepest: depth to which these heads are asked.
        ids: (1, n) a prompt of typical length.
        decoded: names of budgets.
    """
    drafter, budgets = HeadsDrafter(heads), every_budget(deepest)
    asked = {name: budgets[name] for name in decoded}
    if inside_of(drafter) is None:  # nothing stands in the rows that a short chain leaves
        asked = {name: Budget.chain(one.depth) if one.width == 1 else one for name, one in asked.items()}
    rows = sorted({1, *(budget.rows for budget in asked.values())})
    costs = measure_costs(target, drafter, ids, depth=deepest, rows=rows, widths=(1, TREE_WIDTH))
    one = costs.round(PLAIN)
    return {
        "parameters": sum(value.numel() for value in heads.state_dict().values() if value.is_floating_point()),
        "passes": heads.passes(deepest),
        "draft": {name: costs.draft(budget.depth, budget.width) / one for name, budget in asked.items()},
        "pass": {name: costs.target(budget.rows) / one for name, budget in asked.items()},
        "round": {name: costs.round(budget) / one for name, budget in asked.items()},
    }


def ceilings(price: Mapping[str, Any], taus: Mapping[str, float]) -> dict[str, float]:
    """By column ("tree 32, T=0"): the speed-up that its tokens per round allow."""
    return {column: tau / price["round"][column.partition(", T=")[0]] for column, tau in taus.items()}
