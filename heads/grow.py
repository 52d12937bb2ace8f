"""How a drafter's distributions become a draft: chains, static trees, trees by confidence.

One implementation for every kind. A kind answers two questions (:class:`Grower`): what may follow the root,
and what may follow given nodes; everything about shape and budget is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from heads.best_first import Ranked, best_first
from heads.by_depth import by_depth, log_probabilities, ranked_rows
from heads.draft import Draft
from heads.drawn import drawn, fixed, pick, shares


@dataclass(frozen=True)
class Budget:
    """How much a round may draft.

    Attributes:
        rows: rows of the verification pass, the root included: at most ``rows - 1`` tokens are proposed.
        depth: most tokens along one path (the look-ahead K).
        width: children considered at each node; 1 makes a chain, more a tree by confidence (EAGLE-2, 2406.16858), or
            the best there is where heads answer for all depths at once (:mod:`heads.best_first`).
        shape: a static tree instead, as rank paths: ``(0,)`` is the likeliest child of the root, ``(0, 1)`` its
            second-likeliest child. Every path's parent must be there too.
        floors: of a chain, by depth: it ends before that token where the drafter itself gives it and all before it
            together a smaller chance to be accepted. Drafters that tell no chances (:class:`Doubting`), and depths
            beyond, have none.
        parts: of a drafter made of several: what each may draft, in their order, so that one of them can be left out
            (:meth:`split`); () lets the drafter share the rows out.
    """

    rows: int
    depth: int
    width: int = 1
    shape: tuple[tuple[int, ...], ...] | None = None
    floors: tuple[float, ...] = ()
    parts: tuple[Budget, ...] = ()

    def __post_init__(self) -> None:
        if self.rows < 1 or self.depth < 0 or self.width < 1:
            raise ValueError(f"a budget needs rows ≥ 1, depth ≥ 0 and width ≥ 1, not {self}")
        if self.shape is None:
            return
        paths = set(self.shape)
        for path in self.shape:
            if not path or (len(path) > 1 and path[:-1] not in paths):
                raise ValueError(f"the static tree lacks the parent of its path {path}")
            if min(path) < 0:
                raise ValueError(f"ranks count from 0, the likeliest: the static tree has the path {path}")
        if len(paths) != len(self.shape):
            raise ValueError(f"the static tree names a path twice: {self.shape}")
        if (self.rows, self.depth) != (len(paths) + 1, max(map(len, paths), default=0)):
            raise ValueError(
                f"a static tree of {len(paths)} paths does not fit {self.rows} rows and depth {self.depth}: "
                "make the budget with Budget.static"
            )

    @classmethod
    def chain(cls, depth: int) -> Budget:
        """A chain of ``depth`` tokens."""
        return cls(rows=depth + 1, depth=depth)

    @classmethod
    def static(cls, shape: Sequence[Sequence[int]]) -> Budget:
        """A tree of fixed shape."""
        paths = tuple(sorted((tuple(path) for path in shape), key=lambda path: (len(path), path)))
        return cls(
            rows=len(paths) + 1,
            depth=max((len(path) for path in paths), default=0),
            width=1 + max((path[-1] for path in paths if path), default=0),
            shape=paths,
        )

    @classmethod
    def split(cls, parts: Sequence[Budget]) -> Budget:
        """For a drafter made of several: a budget for each, which may be :data:`NOTHING`."""
        asked = [part for part in parts if part.depth]
        return cls(
            rows=1 + sum(part.rows - 1 for part in asked),
            depth=max((part.depth for part in asked), default=0),
            width=max(1, len(asked), *(part.width for part in asked)),
            parts=tuple(parts),
        )

    def within(self, depth: int) -> Budget:
        """The same budget no deeper than ``depth``."""
        if depth >= self.depth:
            return self
        if self.parts:
            return Budget.split([part.within(depth) for part in self.parts])
        if self.shape is not None:
            return Budget.static([path for path in self.shape if len(path) <= depth])
        rows = min(self.rows, depth + 1) if self.width == 1 else self.rows
        return replace(self, rows=rows, depth=depth)

    def fit(self, rows: int) -> Budget:
        """The same budget with at most ``rows`` rows of the pass."""
        if rows >= self.rows:
            return self
        if self.shape is not None:
            return Budget.static(self.shape[: rows - 1])
        if self.parts:
            fitting, left = [], rows - 1
            for part in self.parts:
                fitting.append(part.fit(left + 1))
                left -= fitting[-1].rows - 1
            return Budget.split(fitting)
        return replace(self, rows=rows, depth=min(self.depth, rows - 1))

    def floor(self, depth: int) -> float:
        """Of a chain's token with ``depth`` others before it; 0 where there is none."""
        return self.floors[depth] if depth < len(self.floors) else 0.0


NOTHING = Budget(rows=1, depth=0)

NUCLEUS = 256  # tokens among which top-p looks first


@dataclass
class Sampler:
    """Draws drafted tokens. The tensor drawn from is the very one returned as q: verification depends on it."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if not self.temperature > 0 or (self.top_k is not None and self.top_k < 1):
            raise ValueError(
                f"drafts are drawn with a temperature above 0 and a top_k of 1 or more, not {self.temperature} and "
                f"{self.top_k}: without a sampler the likeliest tokens are drafted"
            )

    def __call__(self, logits: Tensor) -> tuple[int, Tensor]:
        """Draw from float (Vd,) logits: the index, and the float32 distribution (Vd,) it came from."""
        q = self.distribution(logits)
        return self.draw(q), q

    def distribution(self, logits: Tensor) -> Tensor:
        """The float32 distribution (Vd,) that float (Vd,) logits are drawn from: temperature, top-k, top-p."""
        scaled = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < scaled.shape[-1]:
            scaled = scaled.masked_fill(scaled < scaled.topk(self.top_k).values[-1], float("-inf"))
        q = scaled.softmax(-1)
        if not torch.isfinite(q).all():  # heads gone wrong may not stop a decode: any q is lossless
            q = torch.full_like(q, 1.0 / q.shape[-1])
        if self.top_p is not None and self.top_p < 1:
            likely, order = q.topk(min(NUCLEUS, q.shape[-1]))
            if float(likely.sum()) < self.top_p:  # sorting all of a vocabulary costs ten times as much
                likely, order = q.sort(descending=True)
            inside = likely.cumsum(-1) - likely < self.top_p
            inside[0] = True  # the likeliest stays, even with top_p 0
            q = torch.zeros_like(q).scatter(0, order[inside], likely[inside])
            q = q / q.sum()
        return q

    def draw(self, q: Tensor) -> int:
        """An index drawn from (Vd,) ``q``."""
        return pick(q, self.generator)


class Grower(Protocol):
    """What a kind of heads answers while a draft grows; logits are over its draft vocabulary."""

    def first(self) -> Tensor:
        """Logits (Vd,) of the token that follows the root."""
        ...

    def after(self, nodes: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Logits (len(nodes), Vd) of what follows each of ``nodes``.

        Args:
            nodes: nodes of one depth, each asked for once, its parent before it.
            tokens, parents: target ids and parents of all nodes so far.
        """
        ...


@runtime_checkable
class Doubting(Grower, Protocol):
    """A grower that can tell how likely its tokens are to be accepted, and so when a chain is long enough.

    Attributes:
        stop_below: a chain ends before the token with which its chance of being accepted as a whole is below this.
    """

    stop_below: float

    def chance(self) -> float | None:
        """Of the token to be drafted from the logits last answered, once those before it are accepted; None: unknown.

        Asked before it is drafted, of chains only. It may go by the tokens drafted before, never by the one to be
        drawn: a draft that ends where its last token turned out unlikely no longer follows the q it states, and what
        is decoded with it not the target's law.
        """
        ...


def grow(grower: Grower, budget: Budget, sampler: Sampler | None, ids: Tensor | None) -> Draft:
    """Grow one row's draft.

    Args:
        grower: where distributions come from.
        budget: shape and size; ``rows`` 1 or ``depth`` 0 gives the empty draft.
        sampler: draws the tokens, siblings without replacement; None takes the likeliest.
        ids: (Vd,) target ids of the draft vocabulary, None when it is the target's.
    """
    if budget.rows < 2 or budget.depth < 1:
        return Draft.empty()
    if budget.width == 1 and budget.shape is None:
        return _chain(grower, budget, sampler, ids)
    if sampler is None and budget.shape is None and isinstance(grower, Ranked):
        return best_first(grower, budget, ids)
    if sampler is not None:
        plan = shares(budget.rows - 1, budget.depth, budget.width) if budget.shape is None else fixed(budget.shape)
        return drawn(grower, plan, sampler, ids)
    return _static(grower, budget, ids) if budget.shape is not None else by_depth(grower, budget, ids)


def _chain(grower: Grower, budget: Budget, sampler: Sampler | None, ids: Tensor | None) -> Draft:
    depth = min(budget.depth, budget.rows - 1)
    tokens: list[int] = []
    parents = list(range(-1, depth - 1))
    trust: list[float] = []
    whole = 1.0  # the chance of all that is drafted, by the drafter's word
    qs: list[Tensor | None] = []
    scores: list[float] = []
    logits = grower.first()
    for node in range(depth):
        if node:
            logits = grower.after([node - 1], tokens, parents)[0]
        if isinstance(grower, Doubting) and (chance := grower.chance()) is not None:
            whole *= chance
            if whole < max(budget.floor(node), grower.stop_below):
                break
            trust.append(chance)
        if sampler is None:
            best, index = log_probabilities(logits).max(-1)
            place, q, score = int(index), None, float(best)
        else:
            place, q = sampler(logits)
            score = float(q[place].log())
        tokens.append(place if ids is None else int(ids[place]))
        qs.append(q)
        scores.append(score)
    return replace(Draft.chain(tokens, qs, ids, scores), trust=tuple(trust))


def _static(grower: Grower, budget: Budget, ids: Tensor | None) -> Draft:
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    place: dict[tuple[int, ...], int] = {(): -1}
    shape = budget.shape or ()
    for depth in range(1, budget.depth + 1):
        level = [path for path in shape if len(path) == depth]
        asked = list(dict.fromkeys(path[:-1] for path in level))
        nodes = [place[path] for path in asked]
        logits = grower.first()[None] if depth == 1 else grower.after(nodes, tokens, parents)
        values, names = ranked_rows(logits, 1 + max(path[-1] for path in level), ids)
        for path in level:
            row, rank = asked.index(path[:-1]), path[-1]
            if rank >= len(names[row]):
                raise ValueError(f"the static tree asks for rank {rank} of a draft vocabulary of {len(names[row])}")
            place[path] = len(tokens)
            tokens.append(names[row][rank])
            parents.append(place[path[:-1]])
            scores.append(values[row][rank])
    return Draft(tuple(tokens), tuple(parents), (None,) * len(tokens), ids, tuple(scores))
