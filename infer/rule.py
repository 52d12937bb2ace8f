"""What an acceptance rule is, and what all of them are made of.

A rule is given a draft and the target's own distributions ``p`` (every logits processor applied, at that exact prefix)
and names the accepted path and one token of the target's own behind it. So each round emits at least one token.

Randomness goes through a :class:`Chooser`, fresh at each question, so that tests can take every branch and
compute the law of the output instead of sampling it.

What a sampled draft must keep to, for all of this to be exact: each node's ``q`` is the law its token had, given the
nodes *on its path and its elder siblings*; and nothing that was drawn may be dropped because of what it turned out to
be. Rules that look ahead ask for more: q must be its law given *all nodes before it depth first* and which of them
exist. So the size of what hangs from a node may not tell anything about its younger siblings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from heads.draft import Draft
from heads.drawn import pick


class Chooser(Protocol):
    """Where random decisions come from."""

    def accept(self, probability: float) -> bool:
        """True with this probability, independent of every other answer."""
        ...

    def sample(self, distribution: Tensor) -> int:
        """An index drawn from (V,) weights."""
        ...


class RandomChooser:
    """Draws from a torch generator (None: torch's global one), new numbers for every decision."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator = generator

    def accept(self, probability: float) -> bool:
        device = "cpu" if self.generator is None else self.generator.device
        return bool(torch.rand((), dtype=torch.float64, generator=self.generator, device=device) < probability)

    def sample(self, distribution: Tensor) -> int:
        return pick(distribution, self.generator)


class At(Protocol):
    """The target's view of one pass; node -1 is the root.

    ``best`` and ``p`` are asked for along the accepted path only, in order. ``peek`` may be asked for anywhere, a
    node's parent before it.

    Attributes:
        foresight: whether peeking is possible.
    """

    @property
    def foresight(self) -> bool: ...

    def best(self, node: int) -> int:
        """Arg-max token after ``node``."""
        ...

    def p(self, node: int) -> Tensor:
        """Distribution (V,) of the token after ``node``, float32 or better."""
        ...

    def peek(self, node: int) -> Tensor:
        """What ``p`` would be, without leaving a trace in processors that keep a state."""
        ...

    def settle(self, path: Sequence[int]) -> None:
        """After peeking: what was accepted, which now leaves its traces."""
        ...


class Verdict(NamedTuple):
    """Accepted nodes from the root downwards, and the target's own token after the last of them."""

    path: list[int]
    token: int


Rule = Callable[[Draft, At, Chooser], Verdict]


def looks_ahead(rule: Rule) -> Rule:
    """Mark a rule that peeks at nodes which may not be accepted, and settle what was."""

    @functools.wraps(rule)
    def decide(draft: Draft, at: At, chooser: Chooser) -> Verdict:
        verdict = rule(draft, at, chooser)
        at.settle(verdict.path)
        return verdict

    decide.lookahead = True  # type: ignore[attr-defined]
    return decide


def drawn_from(draft: Draft, node: int, like: Tensor) -> Tensor:
    """The distribution (V,) that ``node`` was drawn from, in ``like``'s dtype; one-hot when it was chosen.

    Raises:
        ValueError: it gives the node's token no probability.
    """
    q = draft.full_q(node, like.shape[-1]).to(like)
    q = q / q.sum()  # as the draw normalised it; float32 sums miss 1 by 1e-7
    if not q[draft.tokens[node]] > 0:
        raise ValueError(
            f"the drafter says it drew token {draft.tokens[node]} from a distribution that gives it probability "
            f"{float(q[draft.tokens[node]])}: q must be the very tensor that was sampled from"
        )
    return q


def residual(p: Tensor, q: Tensor, weight: float = 1.0) -> tuple[Tensor, float]:
    """What accepting a token from ``q`` leaves to be emitted: norm((weight·p − q)₊), and the mass before norming.

    Where rounding alone left nothing (p = q: the draft was all but certain) the distribution is ``p`` itself.
    """
    left = (weight * p - q).clamp_min(0)
    mass = float(left.sum())
    return (left / mass if mass > 0 else p), mass


def share_kept(mass: float, weight: float) -> float:
    """Chance of stopping at a node of this weight after its child was rejected: S/(S + 1 − π), 1 where that is 0/0."""
    rest = mass + (1 - weight)
    return mass / rest if rest > 0 else 1.0


def describe(draft: Draft) -> str:
    """A draft in a few words, for messages."""
    sampled = sum(q is not None for q in draft.q)
    how = "chosen" if not sampled else "sampled" if sampled == len(draft) else f"mixed ({sampled} sampled)"
    return f"a {how} {'chain' if draft.is_chain else 'tree'} of {len(draft)} tokens"
