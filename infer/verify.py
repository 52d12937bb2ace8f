"""Which drafted tokens stand: the acceptance rules by name. Every one leaves the target's law exactly as it was.

=========  =====================================  ==========================================================
rule       drafts                                 source
=========  =====================================  ==========================================================
greedy     all, for greedy decoding               the limit of all others
siblings   chosen ones (arg-max, n-grams, top-k)  y ~ p, descend when y is a child
token      all; siblings without replacement      2211.17192, 2302.01318; trees 2402.14160
block      chains                                 2403.10444
traversal  all                                    2505.12398
=========  =====================================  ==========================================================

The first three walk down from the root and read p along the accepted path only. The last two decide from the end and
look ahead (see :mod:`infer.rule`).
"""

from __future__ import annotations

from collections.abc import Callable

from heads.config import nearest
from heads.draft import Draft
from infer.block import block
from infer.rule import At, Chooser, RandomChooser, Rule, Verdict, describe, drawn_from, residual
from infer.traversal import traversal

__all__ = [
    "RULES",
    "At",
    "Chooser",
    "RandomChooser",
    "Rule",
    "Verdict",
    "block",
    "choose_rule",
    "greedy",
    "named",
    "siblings",
    "token",
    "traversal",
]


def greedy(draft: Draft, at: At, chooser: Chooser) -> Verdict:
    """The longest path on which every token is the target's arg-max, then the target's arg-max."""
    return _descend(draft, at.best)


def siblings(draft: Draft, at: At, chooser: Chooser) -> Verdict:
    """For chosen (not sampled) drafts: draw y ~ p at each node and descend when y is one of its children.

    On a chain this is the point-mass rule: accept x with probability p(x), otherwise p without x, renormalised.

    Raises:
        ValueError: a node was sampled.
    """
    if any(q is not None for q in draft.q):
        raise ValueError(
            f"the rule 'siblings' is for chosen drafts and this draft is {describe(draft)}: use 'token', 'block' for "
            "chains or 'traversal'"
        )
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
    sibling (2402.14160) or for the token that ends the round. A chosen child has a one-hot q, a child drawn without
    replacement one that lacks its elder siblings' tokens; trees may mix all of them.
    """
    path: list[int] = []
    node = -1
    while True:
        p = at.p(node)
        for child in draft.children(node):
            q = drawn_from(draft, child, p)
            if chooser.accept(min(1.0, float(p[draft.tokens[child]] / q[draft.tokens[child]]))):
                break
            p, _ = residual(p, q)
        else:
            return Verdict(path, chooser.sample(p))
        path.append(child)
        node = child


RULES: dict[str, Rule] = {
    "greedy": greedy,
    "siblings": siblings,
    "token": token,
    "block": block,
    "traversal": traversal,
}


def choose_rule(draft: Draft, do_sample: bool, at: At | None = None) -> Rule:
    """The rule that accepts most of this draft.

    Sampled chains are decided as a block, trees with sampled nodes by traversal. Where nothing was sampled all rules
    accept the same, and the one that looks at least is taken.

    Args:
        draft: what is to be decided.
        do_sample: False decodes the arg-max.
        at: where p comes from. If it has no foresight (a user's logits processor keeps a state and cannot be copied),
            drafts with sampled nodes are decided by the token rule.
    """
    if not do_sample:
        return greedy
    if all(q is None for q in draft.q):
        return siblings
    if at is not None and not at.foresight:
        return token
    return block if draft.is_chain else traversal


def named(name: str, do_sample: bool) -> Rule | None:
    """The rule of this name; None for ``"auto"``, which chooses by what each draft is (:func:`choose_rule`).

    Raises:
        ValueError: no rule has this name, or it decodes greedily what is to be sampled, or the other way round.
    """
    if name == "auto":
        return None
    if name not in RULES:
        raise ValueError(f"there is no rule {name!r}, only auto, {', '.join(RULES)}{nearest(name, ['auto', *RULES])}")
    if do_sample == (name == "greedy"):
        raise ValueError(
            f"rule {name!r} does not go with do_sample={do_sample}: greedy decoding has the rule 'greedy' and "
            "sampling any other; 'auto' takes the best"
        )
    return RULES[name]
