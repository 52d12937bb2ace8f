"""Tokens per round of every budget from one walk along a greedy text, instead of decoding once for each.

Greedy decoding writes the same text whatever is drafted. So from every place of it one long chain and one large tree
are drafted, and noted how far each is right; a round of any smaller budget that begins there follows from that::

    text    … root  t1  t2  t3  t4 …           place of root    chain  3      three tokens in a row are right
    chain         ─►t1 ─►t2 ─►t3 ─►x                            trees  2 4 9  t1 is in trees of 2 rows, t2 of 4, t3 of 9

A tree by confidence of N rows is the likeliest N - 1 nodes of a larger one of the same depth and width, so the rows of
the smallest tree that holds a right token are its rank there. What is drafted here stands on states of one pass over
the whole text, in real decoding on many short ones: in half precision the two differ by rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from heads.draft import Draft
from heads.grow import Budget
from heads.target import Target
from infer.drafters import Drafter, NoDrafter
from infer.drafters.inside import refuse_inside
from infer.evaluate import Question, Settings
from infer.metrics import Round, Stats, mark_loops


@dataclass(frozen=True)
class Place:
    """What was right of what was drafted behind one token.

    Attributes:
        chain: tokens of the chain, from its first on.
        rows: for the first token behind, the first two, …: rows of the smallest tree that holds them.
    """

    chain: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Walk:
    """A text and its places; ``output`` are the new tokens, a place stands behind each but the last."""

    question: Question
    output: tuple[int, ...]
    places: tuple[Place, ...]
    chain: int
    tree: Budget

    def by_chain(self, depth: int) -> Stats:
        """What decoding with chains of ``depth`` does.

        Raises:
            ValueError: deeper than what was drafted.
        """
        if depth > self.chain:
            raise ValueError(f"chains of {self.chain} were drafted: a depth of {depth} cannot be told from them")
        return self._rounds(lambda place: min(place.chain, depth), depth, depth)

    def by_tree(self, rows: int) -> Stats:
        """What decoding with trees by confidence of ``rows`` rows does.

        Raises:
            ValueError: more rows than what was drafted.
        """
        if rows > self.tree.rows:
            raise ValueError(f"trees of {self.tree.rows} rows were drafted: {rows} cannot be told from them")
        return self._rounds(lambda place: sum(needed <= rows for needed in place.rows), rows - 1, self.tree.depth)

    def _rounds(self, right: Callable[[Place], int], proposed: int, depth: int) -> Stats:
        stats, root, last = Stats(tokens=len(self.output)), 0, len(self.output) - 1
        while root < last:
            accepted = min(right(self.places[root]), last - root)
            emitted = min(accepted + 1, last - root)
            stats.log.append(Round(proposed=proposed, depth=depth, accepted=accepted, emitted=emitted))
            root += emitted
        mark_loops(stats.log, self.output)
        return stats


@torch.inference_mode()
def walk(target: Target, drafter: Drafter, question: Question, settings: Settings, *, chain: int, tree: Budget) -> Walk:
    """Draft from every place of the target's greedy answer.

    Args:
        settings: length of the answer; sampling has no one text to walk along.
        chain: depth of the chains; 0 for none.
        tree: by confidence, as large as any that will be asked for.

    Raises:
        ValueError: sampling, a tree of a fixed shape, or heads that draft inside the verification pass: what they
            draft hangs on the rows of the round before.
    """
    refuse_inside(drafter, "a walk along a text")
    if settings.temperature or tree.shape is not None:
        raise ValueError("budgets are nested in greedy decoding with trees by confidence, and nowhere else")
    text = settings.decode(target, NoDrafter(), question, Budget.chain(0), 0).sequences[0]
    begins = question.ids.shape[1]
    output = text[begins:].tolist()
    chains, trees = (
        _drafts(target, drafter, text, begins, budget, settings.max_new_tokens)
        for budget in (Budget.chain(chain), tree)
    )
    hits = [_right(draft, output[at + 1 :]) for at, draft in enumerate(chains)]
    ranks = [_rows(draft, output[at + 1 :]) for at, draft in enumerate(trees)]
    places = tuple(Place(one, rows) for one, rows in zip(hits, ranks, strict=True))
    return Walk(question, tuple(output), places, chain, tree)


def _drafts(
    target: Target, drafter: Drafter, text: torch.Tensor, begins: int, wanted: Budget, most: int
) -> list[Draft]:
    """A draft behind each new token of ``text`` (n,) but the last, the text before it being committed.

    As in decoding, no draft is deeper than what may still be emitted of ``most`` new tokens: its rows go where it may.
    """
    own, taps = drafter.fork(), None
    for module in getattr(own, "modules", ()):
        module.eval()
    if own.taps:
        taps = target.forward(text[None, :-1], taps=own.taps, logits_to_keep=1).taps
    own.begin(target, text[None, : begins + 1], None if taps is None else taps[:, :begins])
    found = []
    for root in range(begins, len(text) - 1):
        if root > begins:
            own.commit(None if taps is None else taps[:, root - 1 : root], [int(text[root])])
        budget = wanted.within(most - (root - begins) - 2)
        found.append(own.propose(budget, None) if budget.depth and budget.rows > 1 else Draft.empty())
    return found


def _path(draft: Draft, after: list[int]) -> list[int]:
    """The nodes, from the root's child on, that say what really comes."""
    nodes: list[int] = []
    for token in after:
        at = nodes[-1] if nodes else -1
        match = [i for i, parent in enumerate(draft.parents) if parent == at and draft.tokens[i] == token]
        if not match:
            break
        nodes.append(match[0])
    return nodes


def _right(draft: Draft, after: list[int]) -> int:
    return len(_path(draft, after))


def _rows(draft: Draft, after: list[int]) -> tuple[int, ...]:
    """Rows that a tree needs to hold each right node: its rank by the product of probabilities along its path.

    Raises:
        ValueError: the drafter does not say how likely its nodes are.
    """
    if len(draft) and not draft.scores:
        raise ValueError("this drafter gives its nodes no probabilities: smaller trees cannot be told from larger ones")
    sums: list[float] = []
    for parent, score in zip(draft.parents, draft.scores, strict=True):
        sums.append(score + (sums[parent] if parent >= 0 else 0.0))
    order = sorted(range(len(draft)), key=lambda node: (-sums[node], node))
    rank = {node: place for place, node in enumerate(order)}
    return tuple(rank[node] + 2 for node in _path(draft, after))  # the root has a row, and ranks count from 0
