"""What the loop asks of anything that proposes tokens."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from torch import Tensor

from heads.draft import Draft
from heads.grow import Budget, Sampler
from heads.inside import ExtraRows
from heads.target import Target


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens for one text at a time.

    Four attributes are optional. ``modules``: the networks it runs, which are in eval mode while it drafts.
    ``match``: how many tokens of the text's end stood earlier, for one that copies what followed there; look-ahead
    control reads it before each draft.
    ``inside``: an :class:`Inside`, if it drafts in the target's passes.
    ``shares_cache = True``: it drafts in the target's own cache, and is handed its text's part of it, by a call of
    ``share(row)`` before ``begin``; what it appends there it takes away again before ``propose`` returns.

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
        """A draft within the budget; tokens may be drawn with the sampler, and must then come with their q."""
        ...

    def commit(self, taps: Tensor | None, ids: list[int]) -> None:
        """What a round emitted: a accepted tokens and a last one; taps (1, a+1, taps·H) of the rows they follow."""
        ...

    def fork(self) -> Drafter:
        """A drafter for another text at the same time: it may share weights with this one, never state."""
        ...


class Inside(Protocol):
    """What drafts in the passes that verify, by rows of its own there (:class:`heads.inside.DraftsInside`)."""

    def usual(self, depth: int) -> Budget:
        """The budget of chains of this depth, for a caller that names none."""
        ...

    def reserve(self, budget: Budget) -> Budget:
        """The part of a budget for tokens."""
        ...

    def extra_rows(self, draft: Draft, budget: Budget, room: int) -> ExtraRows:
        """The rows to add to the pass that verifies a draft; ``room`` positions are left behind its root."""
        ...

    def applied(self, target: Target, first: int, slots: Tensor) -> AbstractContextManager[None]:
        """Entered around a pass whose rows from ``first`` on are added ones, (B, m) ``slots`` of them."""
        ...

    def read(self, taps: Tensor) -> None:
        """Taps (1, m, taps·H) of the added rows behind the last accepted node; told before ``commit``, each round."""
        ...
