"""Trees by confidence where each depth is a pass of its own: the likeliest nodes of a depth are expanded (EAGLE-2)."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from torch import Tensor

from heads.draft import Draft

if TYPE_CHECKING:
    from heads.grow import Budget, Grower


def log_probabilities(logits: Tensor) -> Tensor:
    """Float32 log-probabilities; NaN counts as impossible, so that broken heads draft badly instead of crashing."""
    return logits.float().log_softmax(-1).nan_to_num(nan=float("-inf"), neginf=float("-inf"))


def ranked_rows(logits: Tensor, count: int, ids: Tensor | None) -> tuple[list[list[float]], list[list[int]]]:
    """Log-probabilities and target ids of each row's ``count`` likeliest entries."""
    top = log_probabilities(logits).topk(min(count, logits.shape[-1]), -1)
    return top.values.tolist(), (top.indices if ids is None else ids[top.indices]).tolist()


def by_depth(grower: Grower, budget: Budget, ids: Tensor | None) -> Draft:
    """EAGLE-2's tree (arXiv 2406.16858): each depth expands the ``width`` likeliest nodes, the best ones are kept.

    Likeliest by the product of probabilities along the path, so what is kept always has its parents with it.
    """
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    paths: list[float] = []
    frontier: list[int] = [-1]
    for depth in range(1, budget.depth + 1):
        logits = grower.first()[None] if depth == 1 else grower.after(frontier, tokens, parents)
        values, names = ranked_rows(logits, budget.width, ids)
        fresh: list[int] = []
        for row, parent in enumerate(frontier):
            before = 0.0 if parent < 0 else paths[parent]
            for value, name in zip(values[row], names[row], strict=True):
                fresh.append(len(tokens))
                tokens.append(name)
                parents.append(parent)
                scores.append(value)
                paths.append(before + value)
        frontier = sorted(heapq.nlargest(budget.width, fresh, key=lambda node: paths[node]))
        if depth < budget.depth and len(tokens) >= budget.rows - 1:
            # nothing below the frontier can enter once rows - 1 nodes are likelier than all of it
            bound = heapq.nlargest(budget.rows - 1, paths)[-1]
            frontier = [node for node in frontier if paths[node] > bound] or []
            if not frontier:
                break
    kept = sorted(heapq.nlargest(budget.rows - 1, range(len(tokens)), key=lambda node: (paths[node], -node)))
    new = {old: place for place, old in enumerate(kept)} | {-1: -1}
    return Draft(
        tuple(tokens[i] for i in kept),
        tuple(new[parents[i]] for i in kept),
        (None,) * len(kept),
        ids,
        tuple(scores[i] for i in kept),
    )
