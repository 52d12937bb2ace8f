"""Drafts of more than one kind, and drafts that are told wrongly."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from heads.draft import Draft
from heads.drawn import without
from infer.verify import Chooser
from tests.infer.exact import Make, Text, World


def chosen_first(world: World) -> Make:
    """A chosen child, then a drawn one; below each of them a child of the other kind."""

    def make(chooser: Chooser, text: Text) -> Draft:
        q = world.draft_logits(text).softmax(-1).float()
        best = int(q.argmax())
        x = chooser.sample(q)
        below = world.draft_logits((*text, best)).softmax(-1).float()
        return Draft((best, x, chooser.sample(below), (x + 1) % world.vocab), (-1, -1, 0, 1), (None, q, below, None))

    return make


def chosen_last(world: World) -> Make:
    """Two children drawn without replacement, a third one chosen by what they are, a drawn child below the first."""

    def make(chooser: Chooser, text: Text) -> Draft:
        first = world.draft_logits(text).softmax(-1).float()
        x = chooser.sample(first)
        second = without(first, x)
        assert second is not None
        y = chooser.sample(second)
        below = world.draft_logits((*text, x)).softmax(-1).float()
        tokens = (x, y, (x + y) % world.vocab, chooser.sample(below))
        return Draft(tokens, (-1, -1, -1, 0), (first, second, None, below))

    return make


def mixed_chain(world: World) -> Make:
    """Drawn, chosen, drawn."""

    def make(chooser: Chooser, text: Text) -> Draft:
        q = world.draft_logits(text).softmax(-1).float()
        x = chooser.sample(q)
        y = int(world.draft_logits((*text, x)).argmax())
        below = world.draft_logits((*text, x, y)).softmax(-1).float()
        return Draft.chain([x, y, chooser.sample(below)], [q, None, below])

    return make


def told(make: Make, what: Callable[[Draft, int, Tensor], Tensor]) -> Make:
    """Drafts that are drawn honestly and told wrongly: ``what(draft, node, q)`` instead of q."""

    def lie(chooser: Chooser, text: Text) -> Draft:
        draft = make(chooser, text)
        qs = tuple(None if q is None else what(draft, node, q) for node, q in enumerate(draft.q))
        return Draft(draft.tokens, draft.parents, qs, draft.ids)

    return lie
