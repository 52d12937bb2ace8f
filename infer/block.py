"""Block verification of chains (2403.10444): how much of the chain stands is decided as a whole, from its end.

No rule accepts more of a sampled chain, and the token rule never does: there a token that is too likely under p cannot
make up for one before it that was too unlikely; here it can.
"""

from __future__ import annotations

from heads.draft import Draft
from infer.rule import At, Chooser, Verdict, describe, drawn_from, looks_ahead, residual, share_kept


@looks_ahead
def block(draft: Draft, at: At, chooser: Chooser) -> Verdict:
    """Keep the longest prefix that passes its own test; then one token of what its acceptance left of p.

    With π₀ = 1 and πᵢ = min(1, πᵢ₋₁·p(xᵢ)/q(xᵢ)), the whole chain stands with probability π_γ, and its first i tokens,
    when nothing longer did, with Sᵢ/(Sᵢ + 1 − πᵢ), Sᵢ = Σ (πᵢ·p − q)₊ over what may follow them; then the next token
    is drawn from norm((πᵢ·p − q)₊), or from p behind the whole chain.

    Raises:
        ValueError: the draft is a tree.
    """
    if not draft.is_chain:
        raise ValueError(f"the rule 'block' is for chains and this draft is {describe(draft)}: use 'traversal'")
    weights = [1.0]
    pairs = []
    for node, token in enumerate(draft.tokens):
        p = at.peek(node - 1)
        q = drawn_from(draft, node, p)
        pairs.append((p, q))
        weights.append(min(1.0, weights[-1] * float(p[token] / q[token])))
        if weights[-1] == 0:  # nothing that goes on from here can stand
            break
    length = len(weights) - 1
    if chooser.accept(weights[length]):
        return Verdict(list(range(length)), chooser.sample(at.peek(length - 1)))
    for kept in reversed(range(1, length)):
        left, mass = residual(*pairs[kept], weights[kept])
        if chooser.accept(share_kept(mass, weights[kept])):
            return Verdict(list(range(kept)), chooser.sample(left))
    return Verdict([], chooser.sample(residual(*pairs[0])[0]))
