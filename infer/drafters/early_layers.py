"""Self-speculative drafting: some of the target's own layers, its final norm and its output matrix draft for it.

Nothing is loaded twice and no committed token is run twice. Below the first layer left out the draft sees exactly
what the target saw, so it goes on from the target's own cache; drafted entries stand behind the committed ones and
are cropped away before the target's next pass. Layers behind the gap have keys and values of their own for the text,
made from the hidden state that the target's pass had in front of the gap (a tap)::

      layers:0-8,20-29        0 … 8        the target's cache
                              9 … 19       left out; tap 9 is the state that enters layer 9
                              20 … 29      own cache, fed with tap 9
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from heads.base import DraftHeads
from heads.draft import Draft
from heads.grow import Budget, Sampler, grow
from heads.kv import RowView
from heads.target import Target
from infer.cache import ForgettingLayer
from infer.drafters.grower import DecoderGrower, causal
from infer.drafters.timed import ModuleClock
from infer.static import FixedStore

LOOKAHEAD = 4
CHUNK = 512  # committed rows run at once, which bounds their mask


class Row(Protocol):
    """One text's part of the target's cache, as ``ForgettingCache.row`` gives it."""

    @property
    def length(self) -> int: ...

    def layer(self, at: int) -> RowView: ...

    def crop(self, length: int) -> None: ...


class SharedLayer(ForgettingLayer):
    """A layer of the target's cache, for one text; asked for anew each time, since texts move in a batch."""

    def __init__(self, row: Row, at: int, sliding: bool) -> None:
        super().__init__(sliding, capacity=1)
        self.row, self.at = row, at

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append behind the text."""
        return self.row.layer(self.at).append(key_states, value_states)

    def get_seq_length(self) -> int:
        return self.row.layer(self.at).length


class EarlyLayersDrafter:
    """Drafts with a subset of the target's layers: chains, greedy or drawn, and trees.

    Args:
        target: the model that decodes.
        layers: numbers of the layers that draft, from 0, increasing, not all of them.
        lookahead: how deep it drafts when the caller names no budget.

    Raises:
        ValueError: wrong layers, or a target whose layers cannot be run in part.
    """

    shares_cache = True

    def __init__(self, target: Target, layers: Sequence[int], *, lookahead: int = LOOKAHEAD) -> None:
        if len(layers) >= target.num_layers:
            raise ValueError(f"all {target.num_layers} layers of {target.name} would draft for it: leave some out")
        self.target, self.layers, self.lookahead = target, tuple(layers), lookahead
        self.first_skipped = next(at for at, layer in enumerate([*layers, -1]) if at != layer)
        behind = self.layers[self.first_skipped :]
        self._whole = target.partial(self.layers)
        self._behind = target.partial(behind) if behind else None
        self.taps: tuple[int, ...] = (self.first_skipped,) if behind else ()
        # a model makes no mask for one row, unless it has windows or finds layer 0 of its cache empty
        self._unmasked = self.first_skipped > 0 and set(target.layer_types) == {"full_attention"}
        self._clock = ModuleClock()
        self._row: Row | None = None
        self._cache: Any = None
        self._own: list[ForgettingLayer] = []  # layers behind the gap
        self._root_token, self._known = -1, 0  # tokens of the text that those layers have run
        self._waiting: list[Tensor] = []

    @classmethod
    def from_spec(cls, argument: str, heads: DraftHeads | None, target: Target) -> EarlyLayersDrafter:
        """The drafter that ``layers:ARGUMENT`` names, e.g. ``layers:0-8,20-29`` (both ends of a range included).

        Raises:
            ValueError: it is written otherwise, or names layers the target has not.
        """
        return cls(target, parse_layers(argument))

    @property
    def module_seconds(self) -> float:
        """Time inside the layers."""
        return self._clock.seconds

    def fork(self) -> EarlyLayersDrafter:
        """The same layers for another text."""
        return EarlyLayersDrafter(self.target, self.layers, lookahead=self.lookahead)

    def share(self, row: Row) -> None:
        """The text's part of the target's cache, before :meth:`begin`; it is left as it was found."""
        self._row = row

    def begin(self, target: Target, ids: Tensor, taps: Tensor | None) -> None:
        """Remember the prompt's taps.

        Raises:
            ValueError: another target decodes, or its cache was not shared.
        """
        if target.model is not self.target.model:
            raise ValueError(f"these are layers of {self.target.name}, not of {target.name}: make the drafter for it")
        if self._row is None:
            raise ValueError("drafting with the target's own layers needs its cache: share(row) comes before begin")
        layers: list[ForgettingLayer] = []
        for at, kind in enumerate(target.layer_types):
            sliding = kind == "sliding_attention"
            shared = at < self.first_skipped
            layers.append(SharedLayer(self._row, at, sliding) if shared else ForgettingLayer(sliding, 256))
        self._cache, self._own = Cache(layers=list(layers)), layers[self.first_skipped :]
        self._root_token, self._known, self._waiting = int(ids[0, -1]), 0, []
        self._wait(taps)

    def propose(self, budget: Budget, sampler: Sampler | None) -> Draft:
        """Grow a draft behind the committed text; the target's cache is as before when this returns."""
        assert self._row is not None, "begin comes first"
        length = self._row.length
        try:
            with torch.no_grad(), self._clock.running():
                self._catch_up()
                budget = self._fitting(budget, length)
                if not budget.depth:
                    return Draft.empty()
                root = self._step([self._root_token], [length], None)[0]
                draft = grow(DecoderGrower(root, length + 1, self._step), budget, sampler, None)
        finally:
            self._crop(length)
        return draft

    def commit(self, taps: Tensor | None, ids: list[int]) -> None:
        """Remember the new root, and the taps of the rows before it."""
        self._root_token = ids[-1]
        self._wait(taps)

    def _wait(self, taps: Tensor | None) -> None:
        if self._behind is not None:
            assert taps is not None, "the tap in front of the gap was asked for"
            self._waiting.append(taps)

    def _fitting(self, budget: Budget, length: int) -> Budget:
        """Less deep where the target's positions end, or its cache does that cannot grow."""
        assert self._row is not None
        if self.target.max_positions is not None:
            budget = budget.within(max(0, self.target.max_positions - length))
        store = self._row.layer(0).store
        if isinstance(store, FixedStore):
            room = store.keys.shape[2] - length
            while budget.depth and _entries(budget) > room:
                budget = budget.within(budget.depth - 1)
        return budget

    def _catch_up(self) -> None:
        """Give the layers behind the gap the committed rows they have not seen."""
        if self._behind is None or not self._waiting:
            return
        states = torch.cat(self._waiting, 1)
        self._waiting = []
        for part in states.split(CHUNK, 1):
            n = part.shape[1]
            positions = torch.arange(self._known, self._known + n, device=part.device)[None]
            mask = causal(n, self._known).to(part.device)
            self._behind(states=part, cache=self._cache, mask=mask, positions=positions)
            self._known += n

    def _step(self, tokens: list[int], positions: list[int], mask: Tensor | None) -> Tensor:
        """Logits (n, V) behind each of n tokens."""
        device = self.target.device
        if mask is None and not self._unmasked:
            mask = causal(1, positions[0])
        hidden = self._whole(
            torch.tensor([tokens], device=device),
            cache=self._cache,
            mask=None if mask is None else mask.to(device),
            positions=torch.tensor([positions], device=device),
        )
        return self.target.project(hidden[0])

    def _crop(self, length: int) -> None:
        assert self._row is not None
        self._row.crop(length)
        for layer in self._own:
            if layer.store is not None:
                layer.store.crop(length)


def _entries(budget: Budget) -> int:
    """Most that a draft appends to the cache: the root and all nodes but those of the last depth."""
    if budget.shape is not None:
        return 1 + sum(len(path) < budget.depth for path in budget.shape)
    return 1 + budget.width * (budget.depth - 1)


def parse_layers(text: str) -> list[int]:
    """``"0-8,20-29"`` → layer numbers; ranges include both ends.

    Raises:
        ValueError: it is not a list of numbers and ranges, or they do not increase.
    """
    numbers: list[int] = []
    for piece in text.split(","):
        ends = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", piece)
        if ends is None or int(ends[2] or ends[1]) < int(ends[1]):
            raise ValueError(f"layers {text!r} are not ranges like 0-8,20-29 (both ends included): {piece!r}")
        numbers += range(int(ends[1]), int(ends[2] or ends[1]) + 1)
    if numbers != sorted(set(numbers)):
        raise ValueError(f"layers {text!r} do not increase: write each layer once, in order")
    return numbers


def format_layers(layers: Sequence[int]) -> str:
    """Layer numbers as :func:`parse_layers` reads them: ``"0-8,20-29"``."""
    ranges: list[list[int]] = []
    for layer in layers:
        if ranges and layer == ranges[-1][1] + 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
