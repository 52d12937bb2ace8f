"""How far to draft: the measured cost of a round times the measured acceptance, plain decoding when that is faster.

A round of B texts, each with N rows and a draft of depth K, costs ``t_B(N) + B·d(K)`` seconds and yields for each text
the expected number of tokens: ``1 + Σ P(the first i drafts hold)`` for a chain and ``1 + Σ P(the node's path is the
target's)`` for a tree. Everything here is arithmetic on two measured tables; :mod:`infer.costs` fills the first with
the clock and :mod:`infer.evaluate` the second by decoding. :mod:`infer.control` chooses anew in each round.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from heads.grow import Budget

PLAIN = Budget.chain(0)
TREE_ROWS = (4, 6, 8, 12, 16, 24, 32, 48, 64)

Shape = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class CostTable:
    """What one machine pays, in seconds, for one target and one drafter.

    Attributes:
        rows: rows of a target pass over one text -> seconds (N = 1 is plain decoding).
        drafts: (depth, width) -> seconds of one text's draft, the drafter's update after the round included.
        context: tokens in the cache while the passes were timed.
        overhead: seconds a round spends on each text outside the target and the drafter.
        settings: where the figures hold (device, dtype, threads), for people and for a refusal to reuse them elsewhere.
        batches: texts in a pass -> rows of each -> seconds, for batches of 2 and more that were measured.
    """

    rows: Mapping[int, float]
    drafts: Mapping[tuple[int, int], float]
    context: int
    overhead: float = 0.0
    settings: Mapping[str, str | int] = field(default_factory=dict)
    batches: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    _known: dict[tuple[int, int], float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def target(self, rows: int, batch: int = 1) -> float:
        """Seconds of a pass over ``batch`` texts with ``rows`` rows each, on straight lines between what was measured.

        Without a measured batch it is taken for the pass over ``batch · rows`` rows of one text, or for ``batch``
        passes where those are cheaper; beyond the largest measured one it grows at most in proportion.
        """
        key = (rows, batch)
        if key not in self._known:
            self._known[key] = self._target(rows, batch)
        return self._known[key]

    def _target(self, rows: int, batch: int) -> float:
        one = _on_line(self.rows, rows)
        if batch == 1:
            return one
        if not self.batches:
            return min(_on_line(self.rows, batch * rows), batch * one)
        by_batch = {1: one} | {size: _on_line(table, rows) for size, table in self.batches.items()}
        largest = max(by_batch)
        seconds = _on_line(by_batch, batch)
        most = by_batch[largest]
        return seconds if batch <= largest else min(max(seconds, most), most * batch / largest)

    def draft(self, depth: int, width: int) -> float:
        """Seconds of a draft ``depth`` deep and ``width`` wide; 0 for no draft, or where none was timed."""
        if depth == 0 or not self.drafts:
            return 0.0
        key = (-depth, width)
        if key not in self._known:
            by_width = {
                w: _on_line({d: s for (d, at), s in self.drafts.items() if at == w}, depth)
                for w in {w for _, w in self.drafts}
            }
            self._known[key] = max(_on_line(by_width, width), 0.0)
        return self._known[key]

    def round(self, budget: Budget, batch: int = 1) -> float:
        """Seconds of one round of ``batch`` texts under ``budget``: target, drafts and the loop's own work."""
        drafts = self.draft(budget.depth, budget.width) + self.overhead
        return self.target(budget.rows, batch) + batch * drafts

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`from_dict` reads them back."""
        return {
            "rows": {str(k): v for k, v in self.rows.items()},
            "drafts": [{"depth": d, "width": w, "seconds": s} for (d, w), s in self.drafts.items()],
            "context": self.context,
            "overhead": self.overhead,
            "settings": dict(self.settings),
            "batches": {str(b): {str(k): v for k, v in table.items()} for b, table in self.batches.items()},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CostTable:
        """The table that :meth:`to_dict` wrote.

        Raises:
            ValueError: a field is missing.
        """
        try:
            return cls(
                rows={int(k): float(v) for k, v in values["rows"].items()},
                drafts={(int(row["depth"]), int(row["width"])): float(row["seconds"]) for row in values["drafts"]},
                context=int(values["context"]),
                overhead=float(values["overhead"]),
                settings=dict(values["settings"]),
                batches={int(b): {int(k): float(v) for k, v in t.items()} for b, t in values["batches"].items()},
            )
        except KeyError as missing:
            raise ValueError(f"this is no cost table: field {missing} is missing; measure it again") from None


@dataclass(frozen=True)
class Acceptance:
    """What a drafter's proposals are worth, measured by decoding.

    Attributes:
        joint: chain; entry i is P(drafts 1..i+1 are all accepted).
        ranks: trees; ``ranks[d][r]`` is P(the target takes the child of rank r | the path of depth d was taken).
        dynamic: trees grown by confidence; (rows, depth, width) -> measured tokens per round.
    """

    joint: tuple[float, ...] = ()
    ranks: tuple[tuple[float, ...], ...] = ()
    dynamic: Mapping[tuple[int, int, int], float] = field(default_factory=dict)


@dataclass(frozen=True)
class Candidate:
    """One way to decode and what it is expected to give each text."""

    name: str
    budget: Budget
    tokens: float
    seconds: float

    @property
    def speed(self) -> float:
        """Expected tokens a second."""
        return self.tokens / self.seconds


def static_tree(ranks: Sequence[Sequence[float]], rows: int) -> Shape:
    """The tree of ``rows - 1`` nodes that yields most tokens under rank acceptance ``ranks[depth][rank]``.

    A node's probability is the product along its path and never above its parent's, so taking the most probable
    nodes one by one is optimal. Nodes that add nothing are left out.

    Returns:
        Rank paths, parents before children: ``((0,), (1,), (0, 0))`` is two children of the root, the first with one.
    """
    shape = (path for path, _ in islice(likeliest(ranks), max(rows - 1, 0)))
    return tuple(sorted(shape, key=lambda path: (len(path), path)))


def likeliest(ranks: Sequence[Sequence[float]]) -> Iterator[tuple[tuple[int, ...], float]]:
    """Rank paths and their probabilities, most probable first, parents before children; those of 0 never come."""
    heap: list[tuple[float, tuple[int, ...]]] = []

    def offer_children(path: tuple[int, ...], chance: float) -> None:
        for rank, held in enumerate(ranks[len(path)] if len(path) < len(ranks) else ()):
            if chance * held > 0:
                heapq.heappush(heap, (-chance * held, (*path, rank)))

    offer_children((), 1.0)
    while heap:
        chance, path = heapq.heappop(heap)
        yield path, -chance
        offer_children(path, -chance)


def expected_tokens(shape: Shape, ranks: Sequence[Sequence[float]]) -> float:
    """Tokens a round of a static tree: 1 + Σ over nodes of P(the node's path is the target's)."""
    total = 1.0
    for path in shape:
        chance = 1.0
        for depth, rank in enumerate(path):
            chance *= ranks[depth][rank]
        total += chance
    return total


def candidates(
    costs: CostTable,
    acceptance: Acceptance,
    tree_rows: Sequence[int] = TREE_ROWS,
    batch: int = 1,
    chain: Callable[[int], Budget] = Budget.chain,
) -> list[Candidate]:
    """Every way to decode that the measurements speak about, fastest first; plain decoding is always one of them.

    Tokens are each text's, seconds those of a round of ``batch`` texts. ``chain`` is the budget of a depth.
    """
    found = [Candidate("plain", PLAIN, 1.0, costs.round(PLAIN, batch))]
    tokens = 1.0
    for depth, joint in enumerate(acceptance.joint, 1):
        tokens += joint
        budget = chain(depth)
        found.append(Candidate(f"chain {depth}", budget, tokens, costs.round(budget, batch)))
    for rows in tree_rows:
        shape = static_tree(acceptance.ranks, rows)
        if len(shape) == rows - 1:  # otherwise the ranks measured do not fill it, and a smaller one is the same tree
            budget = Budget.static(shape)
            tokens = expected_tokens(shape, acceptance.ranks)
            found.append(Candidate(f"static tree {rows}", budget, tokens, costs.round(budget, batch)))
    for (rows, depth, width), tau in acceptance.dynamic.items():
        budget = Budget(rows=rows, depth=depth, width=width)
        found.append(
            Candidate(f"dynamic tree {rows} depth {depth} width {width}", budget, tau, costs.round(budget, batch))
        )
    return sorted(found, key=lambda candidate: candidate.speed, reverse=True)


def best_budget(costs: CostTable, acceptance: Acceptance, tree_rows: Sequence[int] = TREE_ROWS) -> Budget:
    """The budget with most expected tokens a second; :data:`PLAIN` when drafting does not pay."""
    return candidates(costs, acceptance, tree_rows)[0].budget


def _on_line(points: Mapping[int, float], at: int) -> float:
    """Linear interpolation between measured points, the outer segments prolonged; one point is a constant."""
    if not points:
        raise ValueError("the cost table is empty: measure it first")
    known = sorted(points)
    if at in points or len(known) == 1:
        return points.get(at, points[known[0]])
    right = min(max(bisect_left(known, at), 1), len(known) - 1)
    low, high = known[right - 1], known[right]
    slope = (points[high] - points[low]) / (high - low)
    return points[low] + slope * (at - low)
