"""Which drafted tokens stand: the acceptance rules. Every rule leaves the target's law exactly as it was.

A rule walks down the draft from the root. At each node it reads the target's own distribution ``p`` there (every
logits processor applied, at that exact prefix) and either descends to a child, whose token is thereby emitted, or
emits one token of its own and stops. So each round emits at least one token.

Randomness goes through a :class:`Chooser`, fresh at each question, so that tests can take every branch and
compute the law of the output instead of sampling it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from heads.draft import Draft


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
        return int(torch.multinomial(distribution, 1, generator=self.generator))


class At(Protocol):
    """The target's view of one pass; node -1 is the root."""

    def best(self, node: int) -> int:
        """Arg-max token after ``node``."""
        ...

    def p(self, node: int) -> Tensor:
        """Distribution (V,) of the token after ``node``, float32 or better."""
        ...


class Verdict(NamedTuple):
    """Accepted nodes from the root downwards, and the target's own token after the last of them."""

    path: list[int]
    token: int


Rule = Callable[[Draft, At, Chooser], Verdict]


def greedy(draft: Draft, at: At, chooser: Chooser) -> Verdict:
    """The longest path on which every token is the target's arg-max, then the target's arg-max."""
    return _descend(draft, at.best)


def siblings(draft: Draft, at: At, chooser: Chooser) -> Verdict:
    """For chosen (not sampled) drafts: draw y ~ p at each node and descend when y is one of its children.

    On a chain this is the point-mass rule: accept x with probability p(x), otherwise p without x, renormalised.
    """
    return _descend(draft, lambda node: chooser.sample(at.p(node)))


def _descend(draft: Draft, pick: Callable[[int], int]) -> Verdict:
    path: list[int] = []
    node = -1
    while True:
        token = pick(node)
        child = next((child for child in draft.children(node) if draft.tokens[child] == token), None)
        if child is None:
            return Verdict(path, token)
        path.append(child)
        node = child


def token(draft: Draft, at: At, chooser: Chooser) -> Verdict:
    """The token rule of 2211.17192 and 2302.01318, for each child in turn with its own q.

    Accept child x with probability min(1, p(x)/q(x)); after a rejection go on with p ← norm((p − q)₊), for the next
    sibling (2402.14160) or for the token that ends the round. A chosen child has a one-hot q; trees may mix both.
    """
    path: list[int] = []
    node = -1
    while True:
        p = at.p(node)
        for child in draft.children(node):
            q = _drawn_from(draft, child, p)
            if chooser.accept(min(1.0, float(p[draft.tokens[child]] / q[draft.tokens[child]]))):
                break
            p = residual(p, q)
        else:
            return Verdict(path, chooser.sample(p))
        path.append(child)
        node = child


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm((p − q)₊), or ``p`` where rounding alone left nothing (p = q: the draft was all but certain)."""
    left = (p - q).clamp_min(0)
    mass = left.sum()
    return left / mass if mass > 0 else p


def _drawn_from(draft: Draft, node: int, like: Tensor) -> Tensor:
    q = draft.full_q(node, like.shape[-1]).to(like)
    q = q / q.sum()  # as the draw normalised it; float32 sums miss 1 by 1e-7
    if not q[draft.tokens[node]] > 0:
        raise ValueError(
            f"the drafter says it drew token {draft.tokens[node]} from a distribution that gives it probability "
            f"{float(q[draft.tokens[node]])}: q must be the very tensor that was sampled from"
        )
    return q


RULES: dict[str, Rule] = {"greedy": greedy, "siblings": siblings, "token": token}


def choose_rule(draft: Draft, do_sample: bool) -> Rule:
    """Arg-max for greedy decoding; otherwise what the draft's nodes are, all chosen or some sampled, decides."""
    if not do_sample:
        return greedy
    return siblings if all(q is None for q in draft.q) else token
