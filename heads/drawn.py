"""Trees of sampled tokens: siblings drawn without replacement, each with the very distribution it was drawn from.

Verification is exact for them only if nothing is kept or dropped for what it turned out to be. So how many children
a node gets is settled before they are drawn, from its own distribution and from what its parent left it: a *plan*.
Comparing nodes that were already drawn, as the tree by confidence of chosen tokens does, is out of the question; it
would tell a node's descendants something about its younger siblings, too.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Optional

import torch
from torch import Tensor

from heads.draft import Draft

if TYPE_CHECKING:
    from heads.grow import Grower, Sampler

# a node's distribution (Vd,) → what is planned below each of its children, None for a leaf
Plan = Callable[[Tensor], Sequence[Optional["Plan"]]]


def drawn(grower: Grower, plan: Plan, sampler: Sampler, ids: Tensor | None) -> Draft:
    """Draw a tree level by level.

    A node gets as many children as its plan says, or fewer where its distribution has no more tokens. Siblings stand
    in the order in which they were drawn; the q of each is its parent's distribution without its elder siblings.

    Args:
        grower: where distributions come from.
        plan: of the root.
        sampler: makes distributions of logits, and draws.
        ids: (Vd,) target ids of the draft vocabulary, None when it is the target's.
    """
    tokens: list[int] = []
    parents: list[int] = []
    qs: list[Tensor | None] = []
    scores: list[float] = []
    frontier: list[tuple[int, Plan]] = [(-1, plan)]
    while frontier:
        nodes = [node for node, _ in frontier]
        logits = grower.first()[None] if nodes == [-1] else grower.after(nodes, tokens, parents)
        fresh: list[tuple[int, Plan]] = []
        for (parent, below), row in zip(frontier, logits, strict=True):
            whole = sampler.distribution(row)
            q: Tensor | None = whole
            for child in below(whole):
                if q is None:
                    break
                place = sampler.draw(q)
                if child is not None:
                    fresh.append((len(tokens), child))
                tokens.append(place if ids is None else int(ids[place]))
                parents.append(parent)
                qs.append(q)
                scores.append(float(whole[place].log()))
                q = without(q, place)
        frontier = fresh
    return Draft(tuple(tokens), tuple(parents), tuple(qs), ids, tuple(scores))


def pick(weights: Tensor, generator: torch.Generator | None) -> int:
    """An index drawn from (V,) ``weights``, among the possible ones only: a fraction of the time once filtered."""
    possible = weights.nonzero()[:, 0]
    return int(possible[torch.multinomial(weights[possible], 1, generator=generator)])


def without(q: Tensor, place: int) -> Tensor | None:
    """(Vd,) distribution ``q`` without one of its tokens, renormalised; None when nothing is left."""
    rest = q.index_fill(0, torch.tensor([place], device=q.device), 0.0)
    mass = rest.sum()
    return rest / mass if mass > 0 else None


def fixed(shape: Sequence[tuple[int, ...]], path: tuple[int, ...] = ()) -> Plan:
    """The plan of a static tree below ``path``: its ranks count draws here, the lowest first, whatever their gaps."""
    below: list[Plan | None] = []
    for child in sorted(other for other in shape if other[:-1] == path):
        inner = any(other[:-1] == child for other in shape)
        below.append(fixed(shape, child) if inner else None)
    return lambda q: below


def shares(nodes: int, depth: int, width: int) -> Plan:
    """The plan of a tree by confidence: ``nodes`` nodes, at most ``depth`` deep, at most ``width`` children each.

    The node's distribution says how likely its first, second, … draw is to be right; as long as nothing is known of
    the levels below, they are taken to look alike. The likeliest ``nodes`` paths of that imagined tree say how many
    nodes each child is given to plan with, once its own distribution is known.
    """

    def plan(q: Tensor) -> list[Plan | None]:
        likely = [chance for chance in q.topk(min(width, q.shape[-1])).values.tolist() if chance > 0]
        sizes: list[int] = []
        heap = [
            (-likely[0], 1, 0, 0, 1.0)
        ]  # -chance, level, rank, child of this node it descends from, parent's chance
        while heap and sum(sizes) < nodes:
            minus, level, rank, first, parent = heapq.heappop(heap)
            if level == 1:
                sizes.append(0)
            sizes[first] += 1
            if rank + 1 < len(likely):
                heapq.heappush(heap, (-parent * likely[rank + 1], level, rank + 1, first + (level == 1), parent))
            if level < depth:
                heapq.heappush(heap, (minus * likely[0], level + 1, 0, first, -minus))
        return [shares(size - 1, depth - 1, width) if size > 1 else None for size in sizes]

    return plan
