"""The classic mistakes, planted one by one: parity of training and decoding sees each a thousand times over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import heads.block as block_module
import heads.block_state as block_state_module
import heads.eagle as eagle_module
from heads.base import DraftHeads
from heads.block import Block
from heads.block_state import BlockGrower, BlockState
from heads.eagle import Eagle
from heads.eagle_state import EagleGrower, EagleState
from heads.kv import KVStore
from heads.medusa import Medusa
from tests.heads.parity import BOUND, CASES, LOOKAHEAD, decoded, make, text_for, unrolled
from tests.heads.small import batch_of, read, small_target


@contextmanager
def tap_off_by_one(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Decoding reads the layer below."""
    start, advance, target = heads.start, heads.advance, heads.target
    lower = tuple(tap - 1 for tap in heads.config.taps)
    ids = text_for(heads)
    wrong, _ = read(target, lower, ids)

    def rows(taps: Tensor, first: int) -> Tensor:
        return wrong[:, first : first + taps.shape[1]]

    done = [0]

    def start_wrong(taps: Tensor, ids: Tensor, mask: Tensor | None = None) -> Any:
        done[0] = taps.shape[1]
        return start(rows(taps, 0), ids, mask)

    def advance_wrong(state: Any, taps: Tensor, ids: Tensor) -> None:
        advance(state, rows(taps, done[0]), ids)
        done[0] += taps.shape[1]

    patch.setitem(heads.__dict__, "start", start_wrong)
    patch.setitem(heads.__dict__, "advance", advance_wrong)
    yield


@contextmanager
def draft_position_off_by_one(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Drafted nodes stand one position further than they were trained to."""
    after = EagleGrower.after

    def shifted(self: EagleGrower, *args: Any) -> Tensor:
        rotation = Eagle.rotation
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Eagle, "rotation", lambda s, positions, dtype: rotation(s, positions + 1, dtype))
            return after(self, *args)

    patch.setattr(EagleGrower, "after", shifted)
    yield


@contextmanager
def equal_positions(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """All steps of a row stand where its first one does."""
    after = EagleGrower.after

    def flat(self: EagleGrower, *args: Any) -> Tensor:
        rotation, row = Eagle.rotation, self.state.rows - 1
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Eagle, "rotation", lambda s, p, dtype: rotation(s, torch.full_like(p, row), dtype))
            return after(self, *args)

    patch.setattr(EagleGrower, "after", flat)
    yield


@contextmanager
def committed_position_off_by_one(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rows committed after the prefill stand one position further."""
    catch_up = EagleState.catch_up

    def shifted(self: EagleState) -> Tensor:
        rotation, extra = Eagle.rotation, int(self.rows > 0)
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Eagle, "rotation", lambda s, positions, dtype: rotation(s, positions + extra, dtype))
            return catch_up(self)

    patch.setattr(EagleState, "catch_up", shifted)
    yield


@contextmanager
def stale_draft(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """The draft before is never forgotten."""
    patch.setattr(KVStore, "crop", lambda self, length: None)
    yield


@contextmanager
def last_drafted_row_missing(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """When all of a draft was accepted, its last token's row is not committed."""
    commit = EagleState.commit

    def short(self: EagleState, taps: Tensor, tokens: Tensor) -> None:
        keep = [i for i in range(taps.shape[1]) if taps.shape[1] <= LOOKAHEAD or i != LOOKAHEAD - 1]
        commit(self, taps[:, keep], tokens[:, keep])

    patch.setattr(EagleState, "commit", short)
    yield


@contextmanager
def later_steps_of_other_rows_seen(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """In training, step j's row also attends the later steps of the rows before it."""

    def attend(q: Tensor, k0: Tensor, v0: Tensor, causal: Tensor, own: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        rows = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        mask = torch.cat([causal[0], *(rows for _ in own)], 1)
        k, v = torch.cat([k0, *(k for k, _ in own)], 2), torch.cat([v0, *(v for _, v in own)], 2)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    patch.setattr(eagle_module, "_attend_unrolled", attend)
    yield


@contextmanager
def future_rows_seen(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """In training, a row also attends the next one."""
    attend = eagle_module._attend_unrolled

    def late(q: Tensor, k0: Tensor, v0: Tensor, causal: Tensor, own: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        return attend(q, k0, v0, torch.cat([causal[..., :1], causal[..., :-1]], -1), own)

    patch.setattr(eagle_module, "_attend_unrolled", late)
    yield


@contextmanager
def hidden_shifted_between_steps(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """In training, a step reads the state of the row before, as EAGLE's data is shifted."""
    feed_back = Eagle.feed_back
    patch.setattr(Eagle, "feed_back", lambda self, out: feed_back(self, out.roll(1, -2) if out.dim() == 3 else out))
    yield


@contextmanager
def token_shifted(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Decoding pairs a row's taps with its own token instead of the next."""
    start = heads.start
    patch.setitem(heads.__dict__, "start", lambda taps, ids: start(taps, ids.roll(1, 1)))
    yield


@contextmanager
def head_off_by_one(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Drafting starts with the second head."""
    head = Medusa.head
    decoding = pytest.MonkeyPatch()
    grower = Medusa.grower

    def wrong(self: Medusa, state: Any) -> Any:
        made = grower(self, state)
        decoding.setitem(self.__dict__, "head", lambda k, hidden: head(self, (k + 1) % LOOKAHEAD, hidden))
        return made

    patch.setattr(Medusa, "grower", wrong)
    try:
        yield
    finally:
        decoding.undo()


@contextmanager
def row_off_by_one(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Decoding stays on the root's state when the draft's tokens were accepted."""
    patch.setattr(Medusa, "advance", lambda self, state, taps, ids: setattr(state, "hidden", taps[:, :1]))
    yield


@contextmanager
def anchor_seen(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """In training, a block also attends the taps of its own anchor, which decoding does not have yet."""
    visible = block_module.visible_context
    patch.setattr(block_module, "visible_context", lambda rows, columns: visible(rows + 1, columns))
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

    patch.setattr(block_state_module, "_attend", causal)
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


Mistake = Callable[[DraftHeads, pytest.MonkeyPatch], Any]
ANY: list[Mistake] = [tap_off_by_one]
IN_EAGLE: list[Mistake] = [
    *ANY,
    draft_position_off_by_one,
    equal_positions,
    committed_position_off_by_one,
    stale_draft,
    last_drafted_row_missing,
    later_steps_of_other_rows_seen,
    future_rows_seen,
    hidden_shifted_between_steps,
    token_shifted,
]
IN_MEDUSA: list[Mistake] = [*ANY, head_off_by_one, row_off_by_one]
IN_BLOCK: list[Mistake] = [
    *ANY,
    anchor_seen,
    block_position_off_by_one,
    slots_at_one_position,
    context_position_off_by_one,
    block_read_in_order,
    context_normed_as_the_block,
    slots_as_in_data_that_is_not_shifted,
    bias_of_the_token_before_the_last,
    root_of_the_round_before,
    stale_draft,
]
PLANTED = [(case, mistake) for case in ("eagle", "eagle 3.1") for mistake in IN_EAGLE] + [
    ("medusa", mistake) for mistake in IN_MEDUSA
]
PLANTED += [("block", mistake) for mistake in IN_BLOCK]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize(("case", "mistake"), PLANTED, ids=lambda value: getattr(value, "__name__", value))
def test_planted_mistakes_exceed_the_bound_a_thousandfold(
    case: str, mistake: Mistake, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = small_target(dtype=dtype)
    heads = make(CASES[case], target)
    ids = text_for(heads)
    batch = batch_of(target, heads.config.taps, ids)
    with mistake(heads, monkeypatch):
        whole = unrolled(heads, batch)
        worst = decoded(heads, ids, batch.taps, [4, 1, 0, 2]).worst(whole, 16)
    assert worst > 1000 * BOUND[dtype]
