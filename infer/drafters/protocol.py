"""What the loop asks of anything that proposes tokens."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from heads.draft import Draft
from heads.grow import Budget, Sampler
from heads.target import Target


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens for one text at a time.

    Two attributes are optional. ``modules``: the networks it runs, which are in eval mode while it drafts.
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
