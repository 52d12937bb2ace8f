"""Masks behind anchors in training and masks in the pass that verifies: the same states and drafts; mistakes show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import heads.behind as behind_module
import heads.gate as gate_module
from heads.inside import ExtraRows
from heads.mtp import Mtp
from heads.mtp_state import MtpGrower
from infer.decode import Decoding
from tests.heads.inside import LOOKAHEAD, decoded, greedy_text, small_mtp, unrolled
from tests.heads.parity import BOUND
from tests.heads.small import small_target

PLAN = (2, 0, 3, 1)  # accepted of each round's draft: some, none, all
CASES: dict[str, dict[str, Any]] = {
    "all linear layers": {},
    "draft vocabulary": {"draft_vocab": 20},
    "two modules": {"lora_modules": ["v_proj", "up_proj"], "lora_rslora": True, "sampler_size": 7},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("case", CASES)
def test_unroll_and_decoding_agree(case: str, tree: bool, dtype: torch.dtype) -> None:
    made = small_mtp(small_target(dtype=dtype), **CASES[case])
    text = greedy_text(made.target)
    assert decoded(made, text, PLAN, tree=tree).worst(unrolled(made, text), 18) <= BOUND[dtype]


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_other_families_agree(family: str) -> None:
    """Gemma 3's windows are narrower than the text, and its embeddings scaled."""
    target = small_target(family, layers=6)
    made = small_mtp(target)
    text = greedy_text(target)
    assert text.shape[1] > 16
    for tree in (False, True):
        assert decoded(made, text, PLAN, tree=tree).worst(unrolled(made, text), 18) <= 1e-10


def test_few_rows_give_fewer_masks_and_the_same_states() -> None:
    made = small_mtp(small_target())
    text = greedy_text(made.target)
    few = decoded(made, text, (1, 0), rows=9)
    assert 0 < len(few.logits) < len(decoded(made, text, (1, 0)).logits)
    assert few.worst(unrolled(made, text), 8) <= 1e-10


@contextmanager
def mask_position_off_by_one(made: Mtp, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Decoding's masks stand one position further."""
    depths = ExtraRows.depths
    patch.setattr(ExtraRows, "depths", lambda self, draft: [depth + 1 for depth in depths(self, draft)])
    yield


@contextmanager
def masks_at_one_position(made: Mtp, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """All masks of a node stand right behind it."""
    depths = ExtraRows.depths
    patch.setattr(
        ExtraRows,
        "depths",
        lambda self, draft: [d - slot for d, slot in zip(depths(self, draft), self.slots, strict=True)],
    )
    yield


def _seeing(change: Callable[[Tensor, int], Tensor]) -> Callable[..., Any]:
    @contextmanager
    def planted(made: Mtp, patch: pytest.MonkeyPatch) -> Iterator[None]:
        visibility = ExtraRows.visibility

        def other(self: ExtraRows, draft: Any) -> Tensor:
            return change(visibility(self, draft), 1 + len(draft))

        patch.setattr(ExtraRows, "visibility", other)
        yield

    return planted


def _all_tokens(rows: Tensor, first: int) -> Tensor:
    rows[first:, :first] = True
    return rows


def _all_masks(rows: Tensor, first: int) -> Tensor:
    rows[first:, first:] = torch.ones_like(rows[first:, first:]).tril()
    return rows


def _own_mask_only(rows: Tensor, first: int) -> Tensor:
    rows[first:, first:] = torch.eye(len(rows) - first, dtype=torch.bool)
    return rows


rejected_tokens_seen = _seeing(_all_tokens)
masks_of_other_nodes_seen = _seeing(_all_masks)
elder_masks_not_seen = _seeing(_own_mask_only)


@contextmanager
def slots_shifted(made: Mtp, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Decoding's masks read their neighbours' embeddings."""
    applied = Mtp.applied
    patch.setattr(
        Mtp,
        "applied",
        lambda self, target, first, slots: applied(
            self, target, first, slots if not first else (slots + 1) % LOOKAHEAD
        ),
    )
    yield


@contextmanager
def adapter_off(made: Mtp, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Decoding's masks are run by the target without its adapter."""
    adapt = gate_module._Gate.adapt
    patch.setattr(gate_module._Gate, "adapt", lambda self, *args: adapt(self, *args) if not self.first else None)
    yield


@contextmanager
def roots_masks_read(made: Mtp, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """The masks behind the root are read, wherever acceptance ended."""
    behind = ExtraRows.behind
    settle = Decoding.settle

    def settled(self: Decoding, *args: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(ExtraRows, "behind", lambda rows, node: behind(rows, -1))
            return settle(self, *args)

    patch.setattr(Decoding, "settle", settled)
    yield


@contextmanager
def masks_of_the_pass_before(made: Mtp, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a pass said is used one round late."""
    late: list[Tensor] = []

    def read(self: Mtp, state: Any, states: Tensor) -> None:
        late.append(states[0])
        state.states = late[-2] if len(late) > 1 else states[0]

    patch.setattr(Mtp, "read", read)
    yield


@contextmanager
def token_before_the_last(made: Mtp, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """The sampler goes by the grandparent."""
    after = MtpGrower.after

    def shifted(self: MtpGrower, nodes: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        return after(self, nodes, [int(self.state.root), *tokens][: len(tokens)], parents)

    patch.setattr(MtpGrower, "after", shifted)
    yield


@contextmanager
def anchors_token_behind_seen(made: Mtp, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """In training, masks also read the token that follows their anchor."""
    run = behind_module.run

    def late(target: Any, ids: Tensor, *, mask: Tensor, **rest: Any) -> Any:
        text = mask.shape[-1] - mask.shape[-2]
        shifted = torch.cat([mask[..., :1], mask[..., : text - 1], mask[..., text:]], -1)
        return run(target, ids, mask=shifted, **rest)

    patch.setattr(behind_module, "run", late)
    yield


@contextmanager
def masks_of_other_anchors_seen(made: Mtp, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """In training, masks also read those of the anchors before theirs."""
    patch.setattr(torch, "block_diag", lambda *blocks: torch.ones(sum(map(len, blocks)), sum(map(len, blocks))).tril())
    yield


@contextmanager
def training_position_off_by_one(made: Mtp, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """In training, masks stand where their anchor does."""
    run = behind_module.run
    patch.setattr(behind_module, "run", lambda *args, positions, **rest: run(*args, positions=positions - 1, **rest))
    yield


MISTAKES: list[Callable[..., Any]] = [
    mask_position_off_by_one,
    masks_at_one_position,
    rejected_tokens_seen,
    masks_of_other_nodes_seen,
    elder_masks_not_seen,
    slots_shifted,
    adapter_off,
    roots_masks_read,
    masks_of_the_pass_before,
    token_before_the_last,
    anchors_token_behind_seen,
    masks_of_other_anchors_seen,
    training_position_off_by_one,
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_planted_mistakes_exceed_the_bound_a_thousandfold(
    number: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = small_mtp(small_target(dtype=dtype))
    text = greedy_text(made.target)
    with MISTAKES[number](made, monkeypatch):
        worst = decoded(made, text, PLAN, tree=True).worst(unrolled(made, text), 16)
    assert worst > 1000 * BOUND[dtype]
