"""Which look-ahead control a drafter gets, and the costs it decides by."""

from __future__ import annotations

from torch import Tensor

from heads.grow import Budget
from heads.target import Target
from infer.beside import BesideControl
from infer.control import TREE_ROWS, TREE_WIDTH, AdaptiveControl, Costs
from infer.cost_store import stored_costs
from infer.drafters import Drafter
from infer.drafters.hybrid import Several
from infer.drafters.inside import inside_of
from infer.drafters.lookup import LookupDrafter
from infer.drafters.merge import Merged
from infer.live import LiveCosts
from infer.riding import RidingControl


def make(
    target: Target, drafter: Drafter, prompt: Tensor, *, seed: int | None = None, budget: Budget | None = None
) -> AdaptiveControl | None:
    """The control of one call; None for a drafter that never proposes.

    Args:
        target: what decodes.
        drafter: what drafts.
        prompt: (1, n) ids, behind which costs are timed where they are not yet known.
        seed: with one, the stored cost table decides and no clock, so that the same seed gives the same text.
        budget: drafts stay within it; the drafter's look-ahead, and trees, by default.

    Raises:
        OSError, ValueError: costs cannot be measured or stored (:func:`infer.cost_store.stored_costs`).
    """
    if drafter.lookahead == 0:
        return None
    _, other = _parts(drafter)
    table = stored_costs(target, other or drafter, prompt)
    return choose(drafter, LiveCosts(table) if seed is None else table, budget, trees=not target.by_place)


def choose(
    drafter: Drafter, costs: Costs, budget: Budget | None = None, *, trees: bool = True
) -> AdaptiveControl | None:
    """The control for a drafter by given costs: of lookup and another drafter, those of the other.

    Args:
        budget: see :func:`make`.
        trees: whether the target reads any.
    """
    if drafter.lookahead == 0:
        return None
    lookup, other = _parts(drafter)
    depth = drafter.lookahead if budget is None else budget.depth
    inside = inside_of(drafter)
    if inside is not None:
        chains = [inside.usual(d) for d in range(1, depth + 1)]
        if budget is not None:
            chains = [chain for chain in chains if chain.rows <= budget.rows] or [budget]
        return RidingControl(costs, chains)
    rows: tuple[int, ...] = TREE_ROWS if trees else ()
    if budget is not None:
        rows = tuple(n for n in rows if n <= budget.rows) if budget.width > 1 else ()
    width = TREE_WIDTH if budget is None else max(budget.width, 2)
    if lookup is None:
        return AdaptiveControl(costs, depth, tree_rows=rows, width=width)
    return BesideControl(
        costs,
        depth,
        copies=min(lookup.lookahead, depth),
        other=0 if other is None else min(other.lookahead, depth),
        name=drafter.names[0] if isinstance(drafter, Several) else "",
        merges=trees and isinstance(drafter, Merged),
        rows=None if budget is None else budget.rows,
        tree_rows=rows,
        width=width,
    )


def _parts(drafter: Drafter) -> tuple[LookupDrafter | None, Drafter | None]:
    """Lookup and what stands behind it; (lookup, None) for lookup alone, (None, None) for any other drafter."""
    if isinstance(drafter, LookupDrafter):
        return drafter, None
    parts = drafter.parts if isinstance(drafter, Several) else ()
    if (
        len(parts) == 2
        and inside_of(drafter) is None
        and isinstance(parts[0], LookupDrafter)
        and not hasattr(parts[1], "match")
    ):
        return parts[0], parts[1]
    return None, None
