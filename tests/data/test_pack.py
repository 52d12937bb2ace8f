"""Packing: nothing crosses from one document to another, neither attention nor positions nor a head's target."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy

from data.pack import Block, attention, pack, plan
from tests.tiny import tiny_model

FOUR, SIX = [11, 12, 13, 14], [21, 22, 23, 24, 25, 26]
ALL = [True] * 10


def packed(*documents: list[int], block: int = 10) -> Block:
    (made,) = pack([(ids, ALL[: len(ids)]) for ids in documents], block)
    return made


def test_documents_of_four_and_six_in_ten() -> None:
    block = packed(FOUR, SIX)
    assert block.ids.tolist() == [*FOUR, *SIX]
    assert block.documents.tolist() == [1, 1, 1, 1, 2, 2, 2, 2, 2, 2]
    assert block.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("ahead", "valid", "ids"),
    [
        (1, [1, 1, 1, 0, 1, 1, 1, 1, 1, 0], [12, 13, 14, 0, 22, 23, 24, 25, 26, 0]),
        (2, [1, 1, 0, 0, 1, 1, 1, 1, 0, 0], [13, 14, 0, 0, 23, 24, 25, 26, 0, 0]),
        (3, [1, 0, 0, 0, 1, 1, 1, 0, 0, 0], [14, 0, 0, 0, 24, 25, 26, 0, 0, 0]),
        (4, [0, 0, 0, 0, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 25, 26, 0, 0, 0, 0]),
        (12, [0] * 10, [0] * 10),
    ],
)
def test_targets_of_heads(ahead: int, valid: list[int], ids: list[int]) -> None:
    """The first head looks two tokens ahead: it has no target at places 2 and 3, nor across into the next document."""
    found, good = packed(FOUR, SIX).targets(ahead)
    assert (found.tolist(), [int(bit) for bit in good]) == (ids, valid)
    with pytest.raises(ValueError, match="ahead is 0"):
        packed(FOUR).targets(0)


def test_only_supervised_tokens_are_targets() -> None:
    (block,) = pack([(FOUR, [False, False, True, False])], 5)
    assert block.targets(1)[1].tolist() == [False, True, False, False, False]
    assert block.targets(2)[1].tolist() == [True, False, False, False, False]


def test_padding_is_told_by_the_document_and_not_by_the_token() -> None:
    """The end of a turn is padding's token too; both real ends stay learned and read."""
    ids, end = [1, 2, 9, 3, 4, 9], 9
    (block,) = pack([(ids, [False, True, True, False, True, True])], 8, pad_id=end)
    assert block.ids.tolist() == [1, 2, 9, 3, 4, 9, 9, 9]
    assert [int(bit) for bit in block.documents > 0] == [1, 1, 1, 1, 1, 1, 0, 0]
    assert [int(bit) for bit in block.loss_mask] == [0, 1, 1, 0, 1, 1, 0, 0]
    mask = attention(block.documents[None])[0, 0]
    assert mask[5].tolist() == [True] * 6 + [False] * 2
    assert mask[6:].tolist() == [[False] * 6 + [True, False], [False] * 7 + [True]]


def test_attention_stays_within_a_document() -> None:
    mask = attention(packed([1, 2], [3, 4, 5], block=5).documents[None])
    assert mask.shape == (1, 1, 5, 5)
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]


def losses(logits: Tensor, block: Block) -> list[Tensor]:
    """Summed loss of the target's own prediction and of three heads, as if each head spoke with these logits."""
    found = []
    for ahead in (1, 2, 3, 4):
        ids, valid = block.targets(ahead)
        found.append(cross_entropy(logits[valid], ids[valid], reduction="sum"))
    return found


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_packed_loss_is_the_sum_of_separate_losses(family: str) -> None:
    model = tiny_model(family)

    def run(block: Block) -> Tensor:
        allowed = attention(block.documents[None])
        mask = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, torch.finfo(torch.float64).min)
        out: Any = model(block.ids[None], attention_mask=mask, position_ids=block.positions[None])
        return out.logits[0]

    with torch.no_grad():
        together = packed(FOUR, SIX, block=12)
        apart = [packed(FOUR, block=4), packed(SIX, block=6)]
        logits = run(together)
        separate = [losses(run(block), block) for block in apart]
        summed = [sum(pair) for pair in zip(*separate, strict=True)]
        torch.testing.assert_close(losses(logits, together), summed, rtol=1e-9, atol=1e-9)
        plain: Any = model(torch.tensor([SIX]))
        torch.testing.assert_close(logits[4:10], plain.logits[0], rtol=1e-9, atol=1e-9)
        changed = run(packed([7, 8, 9, 10], SIX, block=12))
    assert torch.equal(changed[4:10], logits[4:10])
    assert not torch.equal(changed[:4], logits[:4])


def test_every_document_fits_or_is_named() -> None:
    assert plan([3, 9, 4, 1, 2], 10) == [[0, 2, 3, 4], [1]]
    with pytest.raises(ValueError, match="document 1 has 11 tokens"):
        plan([1, 11], 10)
    with pytest.raises(ValueError, match="document 0 has 0 tokens"):
        plan([0], 10)
    with pytest.raises(ValueError, match="2 ids but 1 loss marks"):
        list(pack([([1, 2], [True])], 4))
    assert list(pack([], 4)) == []


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.integers(1, 16), max_size=40))
def test_plans_hold_every_document_once_and_waste_little(lengths: list[int]) -> None:
    plans = plan(lengths, 16)
    assert sorted(place for places in plans for place in places) == list(range(len(lengths)))
    filled = [sum(lengths[place] for place in places) for places in plans]
    assert all(total <= 16 for total in filled)
    assert sum(total <= 8 for total in filled) <= 1  # two half-empty blocks would have been one
