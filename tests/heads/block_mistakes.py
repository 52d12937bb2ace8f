"""The classic mistakes of block heads, each planted where it would be made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import heads.block as block_module
import heads.block_state as block_state_module
from heads.base import DraftHeads
from heads.block import Block
from heads.block_state import BlockGrower, BlockState


@contextmanager
def anchor_seen(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """In training, a block also attends the taps of its own anchor, which decoding does not have yet."""
    visible = block_module.visible
    patch.setattr(block_module, "visible", lambda batch, rows, window: visible(batch, rows + 1, window))
    yield


@contextmanager
def block_position_off_by_one(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Decoding's block stands one position further."""
    run = Block.run
    patch.setattr(BlockState, "read_block", _with(BlockState.read_block, run, lambda positions: positions + 1))
    yield


@contextmanager
def slots_at_one_position(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """All slots of decoding's block stand where the root does."""
    run = Block.run
    patch.setattr(
        BlockState, "read_block", _with(BlockState.read_block, run, lambda positions: positions * 0 + positions[:, :1])
    )
    yield


def _with(method: Callable[..., Any], run: Callable[..., Any], move: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def moved(self: BlockState) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Block, "run", lambda s, hidden, positions, attend: run(s, hidden, move(positions), attend))
            return method(self)

    return moved


@contextmanager
def context_position_off_by_one(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Context committed after the prefill stands one position further."""
    catch_up = BlockState.catch_up

    def shifted(self: BlockState) -> None:
        rotation, extra = Block.rotation, int(self.rows > 0)
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Block, "rotation", lambda s, positions, dtype: rotation(s, positions + extra, dtype))
            catch_up(self)

    patch.setattr(BlockState, "catch_up", shifted)
    yield


@contextmanager
def block_read_in_order(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """In decoding, slots do not see those behind them."""

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n, length = q.shape[2], k.shape[2]
        mask = torch.ones(n, length, dtype=torch.bool).tril(length - n)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    patch.setattr(block_state_module, "attend_stored", causal)
    yield


@contextmanager
def context_normed_as_the_block(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Decoding's context passes the norm that is the block's alone."""
    context = Block.context
    catch_up = BlockState.catch_up

    def normed(self: BlockState) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Block, "context", lambda s, taps: s.layers[0].input_layernorm(context(s, taps)))
            catch_up(self)

    patch.setattr(BlockState, "catch_up", normed)
    yield


@contextmanager
def slots_as_in_data_that_is_not_shifted(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Decoding takes the first mask's slot for the first draft, as DFlash's own models are read."""
    drafted = BlockState.drafted

    def late(self: BlockState) -> tuple[Tensor, Tensor]:
        hidden, unary = drafted(self)
        return hidden.roll(-1, 0), unary.roll(-1, 0)

    patch.setattr(BlockState, "drafted", late)
    yield


@contextmanager
def bias_of_the_token_before_the_last(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """The bias goes by the grandparent."""
    after = BlockGrower.after

    def shifted(self: BlockGrower, nodes: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        return after(self, nodes, [int(self.state.root), *tokens][: len(tokens)], parents)

    patch.setattr(BlockGrower, "after", shifted)
    yield


@contextmanager
def root_of_the_round_before(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """The block stands on the token that the last one stood on."""
    commit = BlockState.commit
    patch.setattr(BlockState, "commit", lambda self, taps, root: commit(self, taps, self.root))
    yield


BLOCK_MISTAKES: list[Callable[[DraftHeads, pytest.MonkeyPatch], Any]] = [
    anchor_seen,
    block_position_off_by_one,
    slots_at_one_position,
    context_position_off_by_one,
    block_read_in_order,
    context_normed_as_the_block,
    slots_as_in_data_that_is_not_shifted,
    bias_of_the_token_before_the_last,
    root_of_the_round_before,
]
