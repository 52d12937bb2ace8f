"""Drafters: anything that proposes tokens, behind one protocol.

``drafters.make`` turns what users write (heads, a drafter of their own, a spec string) into one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from heads.base import DraftHeads
from heads.draft import Draft
from heads.grow import Budget, Sampler
from heads.target import Target
from infer.drafters.heads import HeadsDrafter
from infer.drafters.none import NoDrafter


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens for one text at a time.

    Attributes:
        taps: hidden states it reads from the target's passes, as transformers counts them; () for none.
        lookahead: how deep it drafts when the caller names no budget.
        module_seconds: time spent inside nn.Module forwards so far.
    """

    taps: tuple[int, ...]
    lookahead: int

    @property
    def module_seconds(self) -> float: ...

    def begin(self, target: Target, ids: Tensor, taps: Tensor | None) -> None:
        """A new text: ids (1, n+1), the prompt and the first token; taps (1, n, taps·H) of the prompt's pass."""
        ...

    def propose(self, budget: Budget, sampler: Sampler | None) -> Draft:
        """A draft within the budget; a chain's tokens may be drawn with the sampler, whose q must then be returned."""
        ...

    def commit(self, taps: Tensor | None, ids: list[int]) -> None:
        """What a round emitted: a accepted tokens and a last one; taps (1, a+1, taps·H) of the rows they follow."""
        ...

    def fork(self) -> Drafter:
        """A drafter for another text at the same time: it may share weights with this one, never state."""
        ...


# spec string → drafter, given the heads that came with the model (None when there are none)
SPECS: dict[str, Callable[[DraftHeads | None], Drafter]] = {
    "none": lambda heads: NoDrafter(),
    "heads": lambda heads: HeadsDrafter(_needed(heads)),
}
PLANNED = ("lookup", "model:", "layers:")


def _needed(heads: DraftHeads | None) -> DraftHeads:
    if heads is None:
        raise ValueError(
            'draft="heads" needs heads: name a heads repository as the model, or pass DraftHeads as the draft'
        )
    return heads


def make(draft: Any, heads: DraftHeads | None, target: Target) -> Drafter:
    """The drafter a user means.

    Args:
        draft: None (the model's own heads if it came with some), heads, a drafter, or a spec string.
        heads: what came with the model.
        target: what decodes.

    Raises:
        ValueError: an unknown or not yet supported spec; heads of another target; anything that is not a drafter.
    """
    if draft is None:
        draft = "none" if heads is None else "heads"
    if isinstance(draft, str):
        if draft in SPECS:
            return SPECS[draft](heads)
        pieces = draft.replace("|", "+").split("+")
        planned = len(pieces) > 1 or draft.startswith(PLANNED)
        why = "is not supported in this version" if planned else "is not known"
        raise ValueError(f"draft {draft!r} {why}: use one of {', '.join(map(repr, SPECS))}, heads or a drafter")
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
