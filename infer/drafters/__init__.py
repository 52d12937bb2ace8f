"""Drafters: anything that proposes tokens, behind one protocol.

``drafters.make`` turns what users write (heads, a drafter of their own, a spec string) into one.
"""

from __future__ import annotations

from typing import Any

from heads.base import DraftHeads
from heads.target import Target
from infer.drafters import specs
from infer.drafters.heads import HeadsDrafter
from infer.drafters.hybrid import FirstToSpeak
from infer.drafters.inside import refuse_inside, usual_budget
from infer.drafters.lookup import LookupDrafter
from infer.drafters.merge import Merged
from infer.drafters.none import NoDrafter
from infer.drafters.protocol import Drafter, Inside

__all__ = [
    "Drafter",
    "FirstToSpeak",
    "HeadsDrafter",
    "Inside",
    "LookupDrafter",
    "Merged",
    "NoDrafter",
    "make",
    "refuse_inside",
    "usual_budget",
]


def make(draft: Any, heads: DraftHeads | None, target: Target) -> Drafter:
    """The drafter a user means.

    Args:
        draft: None (the model's own heads if it came with some), heads, a drafter, or a spec string
            (:mod:`infer.drafters.specs`).
        heads: what came with the model.
        target: what decodes.

    Raises:
        ValueError: an unknown spec, or one that asks for what is not there; heads of another target; anything that is
            not a drafter.
        OSError: a spec names a model that does not exist.
    """
    if draft is None:
        draft = "none" if heads is None else "heads"
    if isinstance(draft, str):
        return specs.read(draft, heads, target)
    if isinstance(draft, DraftHeads):
        if draft.target.model is not target.model:
            target.check(draft.config.target)
        return HeadsDrafter(draft)
    if isinstance(draft, Drafter):
        return draft
    raise ValueError(
        "draft must be heads, a drafter (taps, lookahead, module_seconds, begin, propose, commit, fork) "
        f"or a spec string, not {type(draft).__name__}"
    )
