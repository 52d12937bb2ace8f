"""The best tree there is, where depths do not wait for each other: best first, from a heap (DDTree, arXiv 2604.12989).

Heads that answer for all depths at once know every path's odds before a token is drafted. Nodes are taken one by one,
the likeliest path of those on offer first; each offers its next sibling and its first child::

      on offer    b .30   aa .28   c .05            a heap by the product of probabilities along the path
      taken       a .60                             b is next; it will offer c's elder sibling, and ba

A path is never likelier than its parent's, so what is taken first is the best tree of its size: no depth is cut to a
number of nodes, as it is where each depth is a pass of its own (EAGLE-2).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from heads.draft import Draft

if TYPE_CHECKING:
    from heads.grow import Budget

Ranking = tuple[list[float], list[int]]  # log-probabilities, likeliest first, and places in the draft vocabulary


@runtime_checkable
class Ranked(Protocol):
    """A grower that may be asked for the children of any node, whatever was asked before, at almost no cost."""

    def ranked(self, node: int, tokens: Sequence[int], parents: Sequence[int], width: int) -> Ranking:
        """The ``width`` likeliest children of a node, -1 for the root, or as many as there are.

        Args:
            tokens, parents: target ids and parents of all nodes so far.
        """
        ...


def best_first(grower: Ranked, budget: Budget, ids: Tensor | None) -> Draft:
    """The ``budget.rows - 1`` likeliest paths, none deeper than ``depth``, at most ``width`` children each.

    Nodes stand in the order in which they were taken, so that the first n of them are the best tree of n.

    Args:
        grower: where probabilities come from.
        budget: shape and size.
        ids: (Vd,) target ids of the draft vocabulary, None when it is the target's.
    """
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    paths: list[float] = [0.0]  # of the root and each node: log-probability of its path
    depths: list[int] = [0]
    below: list[Ranking] = []  # of the root and each node: its children
    heap: list[tuple[float, int, int, int]] = []  # -log-probability, turn, parent, rank
    turns = count()

    def offer(parent: int, rank: int) -> None:
        if rank < len(below[parent + 1][0]):
            chance = paths[parent + 1] + below[parent + 1][0][rank]
            heapq.heappush(heap, (-chance, next(turns), parent, rank))

    def expand(node: int) -> None:
        deepest = depths[node + 1] >= budget.depth or len(tokens) >= budget.rows - 1
        below.append(([], []) if deepest else grower.ranked(node, tokens, parents, budget.width))
        offer(node, 0)

    expand(-1)
    while heap and len(tokens) < budget.rows - 1:
        minus, _, parent, rank = heapq.heappop(heap)
        values, places = below[parent + 1]
        tokens.append(places[rank] if ids is None else int(ids[places[rank]]))
        parents.append(parent)
        scores.append(values[rank])
        paths.append(-minus)
        depths.append(depths[parent + 1] + 1)
        offer(parent, rank + 1)
        expand(len(tokens) - 1)
    return Draft(tuple(tokens), tuple(parents), (None,) * len(tokens), ids, tuple(scores))


def ranking(log_probabilities: Tensor, width: int) -> Ranking:
    """The ``width`` likeliest of (Vd,) log-probabilities; NaN counts as impossible."""
    known = log_probabilities.nan_to_num(nan=float("-inf"), neginf=float("-inf"), posinf=0.0)
    top = known.topk(min(width, known.shape[-1]))
    return top.values.tolist(), top.indices.tolist()


def depth_of(node: int, parents: Sequence[int]) -> int:
    """How many nodes stand on the path down to ``node``, itself included; 0 for -1, the root."""
    depth = 0
    while node >= 0:
        depth, node = depth + 1, parents[node]
    return depth


class Likeliest:
    """What tokens of a slot are likely, moved by the token before: a low-rank bias looked at for candidates alone.

    A bias over all of a vocabulary for each node of a tree would cost more than the pass that drafted the block. So it
    is computed for the slot's own likeliest entries; the others count with what they have without it.

    Args:
        unary: (Vd,) logits before the token before is known.
        w2: (Vd, r) the bias's second matrix; None without a bias.
        candidates: how many entries.
    """

    def __init__(self, unary: Tensor, w2: Tensor | None, candidates: int) -> None:
        self.unary, self.w2, self.rest = unary.float(), None, None
        self.places: list[int] | None = None
        self._unbiased: dict[int, Ranking] = {}  # by width: the same behind every token
        if w2 is None or candidates >= unary.shape[-1]:
            self.w2 = w2
            return
        top = self.unary.nan_to_num(nan=float("-inf")).topk(candidates)
        self.rest = self.unary.index_fill(0, top.indices, float("-inf")).logsumexp(-1)
        self.unary, self.w2, self.places = top.values, w2[top.indices], top.indices.tolist()

    def after(self, code: Tensor | None, width: int) -> Ranking:
        """The ``width`` likeliest where the token before has this (r,) code."""
        if self.w2 is None or code is None:
            if width not in self._unbiased:
                self._unbiased[width] = ranking(self.unary.log_softmax(-1), width)
            return self._unbiased[width]
        logits = self.unary + (self.w2 @ code).float()
        whole = logits.logsumexp(-1)
        if self.rest is not None:
            whole = torch.logaddexp(whole, self.rest)
        values, places = ranking(logits - whole, width)
        return values, places if self.places is None else [self.places[place] for place in places]
