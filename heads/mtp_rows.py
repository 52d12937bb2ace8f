"""How mask rows are placed behind the nodes of a draft."""

from __future__ import annotations

import math

from heads.draft import Draft
from heads.grow import Budget
from heads.inside import ExtraRows

SHARE = 1 / 3  # of a tree's rows that verify; a chain's share is such that masks can draft as long a chain again
HELD = 0.6  # what a further token drafted is taken to hold with, where nothing better is known


def reserved(budget: Budget) -> Budget:
    """The part of a budget for drafted tokens: of N rows √N in a chain, with as many masks each; a third in a tree."""
    rows = round(math.sqrt(budget.rows) if budget.width == 1 else budget.rows * SHARE)
    return budget.fit(max(2, rows))


def place(draft: Draft, rows: int, slots: int, room: int) -> ExtraRows:
    """Masks behind each node: one behind all of them first, then where a draft is most likely to be used.

    A mask is worth the chance that acceptance ends at its node, times what the drafts of the masks before it hold with.
    Where rows go changes what is drafted next, and never what is accepted.

    Args:
        rows: of masks at most.
        slots: of masks behind one node at most.
        room: positions behind the root that there are.
    """
    worth = []
    for node, chance in enumerate(ends(draft), -1):
        depth = draft.depths[node] if node >= 0 else 0
        for slot in range(min(slots, room - depth)):
            worth.append((-1 - chance if slot == 0 else -chance * HELD**slot, slot, node))
    best = sorted(worth)[: max(rows, 0)]
    return ExtraRows(tuple(node for node, _ in sorted((node, slot) for _, slot, node in best)))


def ends(draft: Draft) -> list[float]:
    """For the root and each node the chance that acceptance ends there, by the draft's own word."""
    reached = [1.0]
    for node, parent in enumerate(draft.parents):
        reached.append(reached[parent + 1] * _holds(draft, node))
    left = list(reached)
    for node, parent in enumerate(draft.parents):
        left[parent + 1] -= reached[node + 1]
    return [max(chance, 0.0) for chance in left]


def _holds(draft: Draft, node: int) -> float:
    """The chance that a node is accepted once its parent is."""
    score = draft.scores[node] if draft.scores and draft.q[node] is None else math.nan
    return math.exp(min(score, 0.0)) if not math.isnan(score) else HELD
