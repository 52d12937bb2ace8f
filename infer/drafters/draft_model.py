"""A separate, smaller model as a drafter, with a cache of its own that is rolled back like the target's.

The cache follows the committed text. What a draft leaves in it is kept as far as it was accepted, closed up; what is
missing then (always the new root; the last drafted token when all were accepted) is run with the next draft::

      text   t0 … t9 root          cache after a draft    [ t0 … t9 root | a  b  c  d ]
      committed: a, c, then x      cache after the commit [ t0 … t9 root a c ]    to run: x
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from heads.base import DraftHeads
from heads.draft import Draft
from heads.grow import Budget, Sampler, grow
from heads.target import Target
from infer.cache import ForgettingCache
from infer.drafters.grower import DecoderGrower, causal
from infer.drafters.timed import ModuleClock
from infer.drafters.vocabulary import check_vocabularies

LOOKAHEAD = 5


class DraftModelDrafter:
    """Drafts with another causal language model: chains, greedy or drawn, and trees.

    Args:
        model: a transformers model, a ``heads.Target`` of it, or its folder or Hub id, loaded in the dtype it is
            stored in. It drafts in eval mode.
        lookahead: how deep it drafts when the caller names no budget.

    Raises:
        ValueError: the model keeps a state that cannot be rolled back, or cannot be read as a language model.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, model: PreTrainedModel | Target | str | Path, *, lookahead: int = LOOKAHEAD) -> None:
        if isinstance(model, str | Path):
            model = Target.load(str(model), dtype="auto")
        self.model = model if isinstance(model, Target) else Target(model)
        self.modules = (self.model.model,)
        self.lookahead = lookahead
        self._clock = ModuleClock()
        self._target: Target | None = None
        self._text: list[int] = []
        self._cached = 0  # committed tokens that the cache holds
        self._cache: Any = self._new_cache()
        self._root: Tensor | None = None  # logits after the last token, once that is in the cache
        self._grower: DecoderGrower | None = None

    @classmethod
    def from_spec(cls, argument: str, heads: DraftHeads | None, target: Target) -> DraftModelDrafter:
        """The drafter that ``model:ARGUMENT`` names: a folder or Hub id, put where the target is.

        Raises:
            ValueError: nothing is named, or its vocabulary is not the target's.
            OSError: there is no such model.
        """
        if not argument:
            raise ValueError('draft="model:" names no model: write "model:FOLDER" or "model:ORG/NAME"')
        drafter = cls(Target.load(argument, dtype="auto", device=target.device))
        drafter._meet(target)
        return drafter

    @property
    def module_seconds(self) -> float:
        """Time inside the model."""
        return self._clock.seconds

    def fork(self) -> DraftModelDrafter:
        """The same model for another text."""
        other = type(self)(self.model, lookahead=self.lookahead)
        other._target = self._target
        return other

    def begin(self, target: Target, ids: Tensor, taps: Tensor | None) -> None:
        """Read the prompt.

        Raises:
            ValueError: the model's vocabulary is not the target's.
        """
        self._meet(target)
        self._text, self._cached = ids[0].tolist(), 0
        self._root = self._grower = None
        self._cache = self._new_cache()
        with torch.no_grad(), self._clock.running():
            self._catch_up()

    def propose(self, budget: Budget, sampler: Sampler | None) -> Draft:
        """Grow a draft; an empty one where the model has no position left."""
        with torch.no_grad(), self._clock.running():
            self._catch_up()
            if self._root is None:
                return Draft.empty()
            self._grower = DecoderGrower(self._root, self._cached, self._step)
            budget = budget.within(self._deepest())
            if self.model.by_place:  # it reads no trees
                budget = Budget.chain(min(budget.depth, budget.rows - 1))
            return grow(self._grower, budget, sampler, None)

    def commit(self, taps: Tensor | None, ids: list[int]) -> None:
        """Keep what was accepted of the last draft; what is missing is run with the next one."""
        path = [] if self._grower is None else self._grower.kept(ids[:-1])
        self._cache.keep([self._cached], [path])
        self._cached += len(path)
        self._text += ids
        self._root = self._grower = None

    def _meet(self, target: Target) -> None:
        if self._target is not target:
            check_vocabularies(target, self.model)
            self._target = target

    def _deepest(self) -> int:
        """How deep a draft may be: its last tokens are not run, so it may end one behind the last position."""
        most = self.model.max_positions
        return sys.maxsize if most is None else max(0, most - len(self._text) + 1)

    def _new_cache(self) -> Any:
        return ForgettingCache(self.model)

    def _catch_up(self) -> None:
        """Run what was committed since the last draft and drop what that draft left behind."""
        self._cache.keep([self._cached], [[]])
        waiting = self._text[self._cached :]
        if not waiting or not self._deepest():
            return
        positions = list(range(self._cached, len(self._text)))
        mask = causal(len(waiting), self._cached) if self._cached and len(waiting) > 1 else None
        self._root = self._step(waiting, positions, mask, last_only=True)[-1]
        self._cached = len(self._text)

    def _step(self, tokens: list[int], positions: list[int], mask: Tensor | None, *, last_only: bool = False) -> Tensor:
        """Logits (n, Vd) over the ids both models have, on the target's device, behind each of n tokens."""
        model = self.model
        known = model.embedding.weight.shape[0]  # the target may say ids of its padding
        out = model.forward(
            torch.tensor([[min(token, known - 1) for token in tokens]], device=model.device),
            cache=self._cache,
            mask=None if mask is None else mask.to(model.device),
            positions=torch.tensor([positions], device=model.device),
            logits_to_keep=int(last_only),
        )
        assert self._target is not None
        return out.logits[0, :, : self._target.vocab_size].to(self._target.device)
