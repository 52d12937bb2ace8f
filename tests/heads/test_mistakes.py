"""The classic mistakes, planted one by one: parity of training and decoding sees each a thousand times over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import heads.autoregressive as autoregressive_module
from heads.autoregressive import Autoregressive
from heads.base import DraftHeads
from heads.eagle_state import EagleGrower, EagleState
from heads.kv import KVStore
from heads.medusa import Medusa
from tests.heads.block_mistakes import BLOCK_MISTAKES
from tests.heads.hydra_mistakes import HYDRA_MISTAKES
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
        rotation = Autoregressive.rotation
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Autoregressive, "rotation", lambda s, positions, dtype: rotation(s, positions + 1, dtype))
            return after(self, *args)

    patch.setattr(EagleGrower, "after", shifted)
    yield


@contextmanager
def equal_positions(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """All steps of a row stand where its first one does."""
    after = EagleGrower.after

    def flat(self: EagleGrower, *args: Any) -> Tensor:
        rotation, row = Autoregressive.rotation, self.state.rows - 1
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Autoregressive, "rotation", lambda s, p, dtype: rotation(s, torch.full_like(p, row), dtype))
            return after(self, *args)

    patch.setattr(EagleGrower, "after", flat)
    yield


@contextmanager
def committed_position_off_by_one(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rows committed after the prefill stand one position further."""
    catch_up = EagleState.catch_up

    def shifted(self: EagleState) -> Tensor:
        rotation, extra = Autoregressive.rotation, int(self.rows > 0)
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Autoregressive, "rotation", lambda s, positions, dtype: rotation(s, positions + extra, dtype))
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

    patch.setattr(autoregressive_module, "attend_rows", attend)
    yield


@contextmanager
def future_rows_seen(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """In training, a row also attends the next one."""
    attend = autoregressive_module.attend_rows

    def late(q: Tensor, k0: Tensor, v0: Tensor, causal: Tensor, own: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        return attend(q, k0, v0, torch.cat([causal[..., :1], causal[..., :-1]], -1), own)

    patch.setattr(autoregressive_module, "attend_rows", late)
    yield


@contextmanager
def hidden_shifted_between_steps(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """In training, a step reads the state of the row before, as EAGLE's data is shifted."""
    kind, feed_back = type(heads), type(heads).feed_back  # type: ignore[attr-defined]
    patch.setattr(kind, "feed_back", lambda self, out: feed_back(self, out.roll(1, -2) if out.dim() == 3 else out))
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
def window_in_training_alone(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Decoding attends all that was committed."""
    start = heads.start

    def unlimited(*args: Any) -> Any:
        state = start(*args)
        state.window = 0
        return state

    patch.setitem(heads.__dict__, "start", unlimited)
    yield


@contextmanager
def window_off_by_one(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Decoding keeps one row more."""
    start = heads.start

    def wider(*args: Any) -> Any:
        state = start(*args)
        state.window += 1
        return state

    patch.setitem(heads.__dict__, "start", wider)
    yield


@contextmanager
def embedding_and_state_exchanged(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Decoding fuses them in the other order."""
    catch_up, inputs = EagleState.catch_up, type(heads).inputs  # type: ignore[attr-defined]

    def turned(self: EagleState) -> Tensor:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(type(heads), "inputs", lambda s, embedding, hidden: inputs(s, hidden, embedding))
            return catch_up(self)

    patch.setattr(EagleState, "catch_up", turned)
    yield


@contextmanager
def fused_without_the_token(heads: DraftHeads, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Decoding's residual is the state, as in EAGLE-3, not what token and state were fused to."""
    after, inputs = EagleGrower.after, type(heads).inputs  # type: ignore[attr-defined]

    def beside(self: EagleGrower, *args: Any) -> Tensor:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(type(heads), "inputs", lambda s, e, hidden: (inputs(s, e, hidden)[0], hidden))
            return after(self, *args)

    patch.setattr(EagleGrower, "after", beside)
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
IN_BLOCK: list[Mistake] = [*ANY, *BLOCK_MISTAKES, stale_draft]
IN_HYDRA: list[Mistake] = [*ANY, *HYDRA_MISTAKES]
IN_A_WINDOW: list[Mistake] = [window_in_training_alone, window_off_by_one]
PLANTED = [(case, mistake) for case in ("eagle", "eagle 3.1") for mistake in IN_EAGLE] + [
    ("medusa", mistake) for mistake in IN_MEDUSA
]
PLANTED += [("block", mistake) for mistake in IN_BLOCK]
PLANTED += [("eagle1", mistake) for mistake in (*IN_EAGLE, embedding_and_state_exchanged, fused_without_the_token)]
PLANTED += [("hydra", mistake) for mistake in IN_HYDRA]
PLANTED += [
    (f"{kind} in a window", mistake) for kind in ("eagle", "eagle1", "hydra", "block") for mistake in IN_A_WINDOW
]


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
