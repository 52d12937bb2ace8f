"""Traversal verification (2505.12398): a tree is decided from its leaves to its root.

On a chain it is block verification. A node is asked only when everything below it was rejected, and then has another
chance with what that left over, so that likely continuations make up for an unlikely token before them.

Why it is exact. Let a node have weight π, and p its distribution. Deciding its subtree accepts with probability π,
and what is emitted then follows the target's law: without children that is plain. A child x ~ q gets the weight
min(1, π·p(x)/q(x)), so it emits x with probability min(q(x), π·p(x)); of π·p this leaves (π·p − q)₊, of mass S, to
be emitted in the case that the child was rejected, which has probability 1 − π + S. That is the same task again:
weight S/(S + 1 − π), distribution norm((π·p − q)₊), the remaining children. The root has weight 1, always.
"""

from __future__ import annotations

from heads.draft import Draft
from infer.rule import At, Chooser, Verdict, drawn_from, looks_ahead, residual, share_kept


@looks_ahead
def traversal(draft: Draft, at: At, chooser: Chooser) -> Verdict:
    """The first node, from the leaves to the root, that passes its test; then one token of what was left of p there.

    Siblings are taken in order, each with its own q (one-hot where it was chosen; without its elder siblings'
    tokens where drawn without replacement), so trees may mix all kinds.
    """

    def decide(node: int, weight: float) -> Verdict | None:
        """Accept in ``node``'s subtree with probability ``weight``; None: all of it is rejected."""
        if weight == 0:
            return None
        children = draft.children(node)
        p = at.peek(node) if children else None
        for child in children:
            assert p is not None
            q = drawn_from(draft, child, p)
            token = draft.tokens[child]
            found = decide(child, min(1.0, weight * float(p[token] / q[token])))
            if found is not None:
                return found
            p, mass = residual(p, q, weight)
            weight = share_kept(mass, weight)
        if not chooser.accept(weight):
            return None
        return Verdict(draft.path(node), chooser.sample(at.peek(node) if p is None else p))

    verdict = decide(-1, 1.0)
    assert verdict is not None, "the root's weight stays 1"
    return verdict
