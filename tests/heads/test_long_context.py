"""Long context: behind 1,500 positions heads draft what they drafted in training, and in a window what they would near.

With a window the law is stronger: what is drafted depends on the last positions alone, so that the same words behind
1,500 others are drafted as they are behind ten. Heads cannot fall off with length then, whatever they learned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import heads.rotary as rotary_module
from heads.base import DraftHeads
from heads.grow import Budget
from heads.kv import KVStore
from heads.target import Target
from tests.heads.parity import Forced, places_of
from tests.heads.small import batch_of, random_ids, relative, small_heads
from tests.tiny import tiny_model

LONG, WINDOW, LOOKAHEAD, WIDTH = 1500, 6, 3, 32
KINDS: dict[str, dict[str, Any]] = {
    "eagle": {"kind": "eagle", "norm_output": True},
    "eagle1": {"kind": "eagle1"},
    "hydra": {"kind": "hydra"},
    "block": {"kind": "block"},
    "medusa": {"kind": "medusa"},
}
WINDOWED = [kind for kind in KINDS if kind != "medusa"]
Told = list[Tensor]


def target() -> Target:
    """Two layers, 2,048 positions."""
    return Target(tiny_model("llama", layers=2, max_position_embeddings=2048), name="tiny/long")


def made_for(kind: str, where: Target, **options: Any) -> DraftHeads:
    taps = (2,) if kind in ("eagle1", "hydra", "medusa") else (1, 2)
    return small_heads(**{"target": where, "lookahead": LOOKAHEAD, "taps": taps, **KINDS[kind], **options})


def told(heads: DraftHeads, state: Any, tokens: Sequence[int]) -> Told:
    """Logits behind the root and each of the tokens in turn."""
    forced = Forced(places_of(heads, tokens))
    heads.propose(state, Budget.chain(len(tokens)), forced)
    return forced.logits


# the last positions alone


def drafted(heads: DraftHeads, taps: Tensor, ids: Tensor, steps: Sequence[int]) -> Told:
    """Read texts of this many positions at a time, drafting in between; logits of the draft behind all of them."""
    ends = torch.tensor(steps).cumsum(0).tolist()
    state = heads.start(taps[:, : ends[0]], ids[:, : ends[0] + 1])
    for begin, end in pairwise(ends):
        heads.propose(state, Budget.chain(LOOKAHEAD))
        heads.advance(state, taps[:, begin:end], ids[:, begin + 1 : end + 1])
    return told(heads, state, [5, 17, 40])


def near_and_far(kind: str, length: int = LONG) -> tuple[Told, Told]:
    """Behind a few positions, and behind ``length`` others and the same few."""
    heads = made_for(kind, target(), window=WINDOW)
    width = len(heads.config.taps) * WIDTH
    taps = torch.randn(1, length, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ids = random_ids(length + 1, seed=2)
    few = WINDOW + 2
    far = drafted(heads, taps, ids, [length - 34, 1, 3, 1, 2, 20, 4, 3])
    near = drafted(heads, taps[:, -few:], ids[:, -few - 1 :], [few])
    return near, far


@pytest.mark.parametrize("kind", WINDOWED)
def test_in_a_window_a_draft_is_the_same_however_far_from_the_beginning(kind: str) -> None:
    near, far = near_and_far(kind)
    assert max(relative(a, b) for a, b in zip(near, far, strict=True)) < 1e-10


@pytest.mark.parametrize("kind", WINDOWED)
def test_what_it_keeps_does_not_grow(kind: str) -> None:
    heads = made_for(kind, target(), window=WINDOW)
    width = len(heads.config.taps) * WIDTH
    state = heads.start(torch.zeros(1, LONG, width, dtype=torch.float64), random_ids(LONG + 1))
    heads.propose(state, Budget.chain(LOOKAHEAD))
    stores = [store for store in [*getattr(state, "stores", []), getattr(state, "store", None)] if store is not None]
    assert stores and all(store.keys.shape[2] <= 256 for store in stores)


# training and decoding


def both(kind: str, **options: Any) -> tuple[Told, Told]:
    """Logits of the last rows of a text of 1,500 tokens: as in training, and drafted along it."""
    where = target()
    heads = made_for(kind, where, **options)
    ids = random_ids(LONG, seed=3)
    loss_mask = torch.zeros_like(ids, dtype=torch.bool)
    loss_mask[:, -12:] = True
    batch = batch_of(where, heads.config.taps, ids, loss_mask)
    trained: dict[tuple[int, int], Tensor] = {}
    with torch.no_grad():
        for j, step in enumerate(heads.unroll(batch)):
            for logits, row in zip(step.logits, step.row.tolist(), strict=True):
                trained[row, j] = logits
    state = heads.start(batch.taps[:, : LONG - 12], ids[:, : LONG - 11])
    ours: Told = []
    theirs: Told = []
    row = LONG - 13
    for stay in (0, 2, 1, 0):
        tokens = ids[0, row + 2 : row + 2 + LOOKAHEAD].tolist()
        if row >= LONG - 14:
            ours += told(heads, state, tokens)
            theirs += [trained[row, j] for j in range(LOOKAHEAD)]
        heads.advance(state, batch.taps[:, row + 1 : row + 2 + stay], ids[:, row + 2 : row + 3 + stay])
        row += stay + 1
    return ours, theirs


@pytest.mark.parametrize("window", [0, 700])
@pytest.mark.parametrize("kind", KINDS)
def test_behind_1500_positions_training_and_decoding_agree(kind: str, window: int) -> None:
    options = {"window": window} if kind in WINDOWED else {}
    ours, theirs = both(kind, **options)
    assert len(ours) == 4 * LOOKAHEAD
    assert max(relative(a, b) for a, b in zip(ours, theirs, strict=True)) < 1e-10


# mistakes: in decoding alone, as they would come of a store or a table of its own


@contextmanager
def decoding_at(patch: pytest.MonkeyPatch, place: Any) -> Iterator[None]:
    """Positions of decoding passes, of one text each, as ``place`` has them."""
    real = rotary_module.rotary

    def rotary(positions: Tensor, dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return real(place(positions), dim, theta, dtype)

    for name in ("heads.layer", "heads.block", "heads.hydra"):
        patch.setattr(f"{name}.rotary", rotary, raising=False)
    yield


PLACES = {
    "a table that ends at 1,024": lambda positions: positions.clamp(max=1023),
    "positions that start anew at 1,497": lambda positions: positions % 1497,
    "positions in bfloat16": lambda positions: positions.bfloat16().long(),
}


@pytest.mark.parametrize("kind", WINDOWED)
@pytest.mark.parametrize("place", PLACES)
def test_positions_that_go_wrong_far_out_would_show(kind: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with decoding_at(monkeypatch, PLACES[place]):
        near, far = near_and_far(kind)
    assert max(relative(a, b) for a, b in zip(near, far, strict=True)) > 1e-7


@pytest.mark.parametrize("kind", WINDOWED)
def test_a_store_that_drops_the_newest_would_show(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = KVStore.keep_last

    def keep_first(self: KVStore, count: int) -> None:
        length = min(self.length, max(count, 0))
        if self.length > length and length:
            self.crop(length)
        else:
            real(self, count)

    monkeypatch.setattr(KVStore, "keep_last", keep_first)
    near, far = near_and_far(kind)
    assert max(relative(a, b) for a, b in zip(near, far, strict=True)) > 1e-7
