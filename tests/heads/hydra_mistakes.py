"""The classic mistakes of hydra heads, each planted where it would be made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import heads.hydra as hydra_module
from heads.base import DraftHeads
from heads.hydra import Hydra
from heads.hydra_state import HydraGrower, HydraState
from tests.heads.parity import LOOKAHEAD


@contextmanager
def hydra_head_off_by_one(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """In decoding, a depth's tokens are read by the head after its own."""
    after = HydraGrower.after

    def late(self: HydraGrower, *args: Any) -> Tensor:
        head = Hydra.head

        def other(s: Hydra, k: int, state: Tensor, embedded: Tensor) -> Tensor:
            if k + 1 == LOOKAHEAD:
                return head(s, k, state, embedded)
            return head(s, k + 1, state, torch.cat([embedded, embedded[..., -state.shape[-1] :]], -1))

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Hydra, "head", other)
            return after(self, *args)

    patch.setattr(HydraGrower, "after", late)
    yield


@contextmanager
def tokens_in_reverse(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """In decoding, the newest token comes first."""
    after, head = HydraGrower.after, Hydra.head

    def reversed_parts(s: Hydra, k: int, state: Tensor, embedded: Tensor) -> Tensor:
        return head(s, k, state, torch.cat(embedded.chunk(k + 1, -1)[::-1], -1))

    def backwards(self: HydraGrower, *args: Any) -> Tensor:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Hydra, "head", reversed_parts)
            return after(self, *args)

    patch.setattr(HydraGrower, "after", backwards)
    yield


@contextmanager
def root_left_out(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """In decoding, a path begins with its first drafted token, and the root's place is filled with that again."""
    after = HydraGrower.after

    def short(self: HydraGrower, nodes: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        if -1 in [parents[node] for node in nodes]:
            self.read[-1] = self.heads.embed(torch.tensor(tokens[nodes[0]]))
        return after(self, nodes, tokens, parents)

    patch.setattr(HydraGrower, "after", short)
    yield


@contextmanager
def hydra_root_of_the_round_before(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """The root that the first head reads is the one before it."""
    commit = HydraState.commit
    patch.setattr(HydraState, "commit", lambda self, taps, root: commit(self, taps, self.root))
    yield


@contextmanager
def state_of_the_round_before(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the heads read of the text is not renewed."""
    drafted = HydraState.drafted

    def stale(self: HydraState) -> Tensor:
        first = self.__dict__.setdefault("first", None)
        if first is None:
            self.__dict__["first"] = first = drafted(self)
        return first

    patch.setattr(HydraState, "drafted", stale)
    yield


@contextmanager
def prefix_position_off_by_one(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rows committed after the prefill stand one position further."""
    catch_up = HydraState.catch_up

    def shifted(self: HydraState) -> Tensor:
        rotation, extra = Hydra.rotation, int(self.rows > 0)
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Hydra, "rotation", lambda s, positions, dtype: rotation(s, positions + extra, dtype))
            return catch_up(self)

    patch.setattr(HydraState, "catch_up", shifted)
    yield


@contextmanager
def prefix_of_later_rows(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """In training, a row's prefix also holds the next row, whose token is yet to be drafted."""
    visible = hydra_module.visible
    patch.setattr(hydra_module, "visible", lambda batch, rows, window: visible(batch, rows + 1, window))
    yield


@contextmanager
def trained_tokens_shifted(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """In training, head k reads token k in place of the root, as if the root were drafted as well."""
    residual = Hydra.residual

    def late(self: Hydra, k: int, state: Tensor, embedded: Tensor) -> Tensor:
        width = state.shape[-1]
        moved = torch.cat([embedded[..., width:], embedded[..., -width:]], -1)
        return residual(self, k, state, moved if state.dim() == 2 and state.shape[0] > 1 else embedded)

    patch.setattr(Hydra, "residual", late)
    yield


HYDRA_MISTAKES: list[Callable[[DraftHeads, pytest.MonkeyPatch], Any]] = [
    hydra_head_off_by_one,
    tokens_in_reverse,
    root_left_out,
    hydra_root_of_the_round_before,
    state_of_the_round_before,
    prefix_position_off_by_one,
    prefix_of_later_rows,
    trained_tokens_shifted,
]
