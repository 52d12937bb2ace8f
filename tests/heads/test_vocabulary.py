"""The reduced draft vocabulary: which tokens it holds, and that draft ids never pass for target ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from heads.base import DraftHeads
from heads.grow import Budget, Sampler
from heads.inside import DraftsInside
from heads.kinds import KINDS
from heads.vocabulary import by_frequency, check_ids, coverage, size_for
from tests.heads.small import random_ids, read, small_heads, small_target

COUNTS = torch.tensor([5, 0, 7, 5, 1, 7, 5, 0])


def test_the_most_frequent_tokens_in_the_order_of_their_ids() -> None:
    assert by_frequency(COUNTS, 2).tolist() == [2, 5]
    assert by_frequency(COUNTS, 3).tolist() == [0, 2, 5]  # of 0, 3 and 6, equally frequent, the lower ids first
    assert by_frequency(COUNTS, 4).tolist() == [0, 2, 3, 5]
    assert by_frequency(COUNTS, 7).tolist() == [0, 1, 2, 3, 4, 5, 6]  # and of those never said
    assert by_frequency(COUNTS, 8).tolist() == list(range(8))
    assert by_frequency(torch.full((50_000,), 3), 4).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [0, -1, 9])
def test_sizes_that_cannot_be_chosen_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"a draft vocabulary of {size} cannot be chosen from 8 tokens"):
        by_frequency(COUNTS, size)


def test_coverage_is_the_share_of_what_is_said() -> None:
    assert coverage(COUNTS, torch.tensor([2, 5])) == pytest.approx(14 / 30)
    assert coverage(COUNTS, torch.arange(8)) == 1
    assert coverage(torch.zeros(8, dtype=torch.long), torch.tensor([1])) == 0


# 7 7 5 5 5 1 of 30 in that order: 7/30, 14/30, 19/30, 24/30, 29/30, 1
@pytest.mark.parametrize(
    ("share", "size"),
    [(0.01, 1), (7 / 30, 1), (0.24, 2), (14 / 30, 2), (0.5, 3), (0.8, 4), (0.81, 5), (29 / 30, 5), (0.97, 6), (1, 6)],
)
def test_a_share_asks_for_the_fewest_tokens_that_cover_it(share: float, size: int) -> None:
    assert size_for(COUNTS, share) == size
    assert coverage(COUNTS, by_frequency(COUNTS, size)) >= share * (1 - 1e-12)
    assert size == 1 or coverage(COUNTS, by_frequency(COUNTS, size - 1)) < share


def test_shares_written_in_decimals_are_met_exactly() -> None:
    """Ten tokens a tenth each: 0.3 of them is three, though 0.1 three times is a little more than 0.3."""
    for tenths in range(1, 11):
        assert size_for(torch.full((10,), 7), tenths / 10) == tenths


@pytest.mark.parametrize("share", [0, -0.5, 1.01, float("nan")])
def test_shares_that_are_none_are_refused(share: float) -> None:
    with pytest.raises(ValueError, match="a share above 0 and at most 1 of what is said, not"):
        size_for(COUNTS, share)
    with pytest.raises(ValueError, match="where nothing was said"):
        size_for(torch.zeros(8, dtype=torch.long), 0.9)


def test_maps_are_checked() -> None:
    assert check_ids(torch.tensor([2, 5, 7], dtype=torch.int32), 3, 8).dtype == torch.int64
    with pytest.raises(ValueError, match=r"has \(2,\) ids where the config says 3"):
        check_ids(torch.tensor([2, 5]), 3, 8)
    for wrong in ([5, 2, 7], [2, 2, 7], [2, 5, 8], [-1, 2, 5], [0, 0, 0], [-1, -1, -1]):
        with pytest.raises(ValueError, match="distinct sorted ids below 8; was its map lost"):
            check_ids(torch.tensor(wrong), 3, 8)


def started(heads: DraftHeads, taps: torch.Tensor, ids: torch.Tensor) -> Any:
    """Behind a prompt, and behind a pass with rows of their own for heads that draft inside it."""
    state = heads.start(taps, ids)
    if isinstance(heads, DraftsInside):
        shape = (1, heads.config.lookahead, heads.config.hidden_size)
        heads.read(state, torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64))
    return state


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_hold_target_ids(kind: str) -> None:
    """A vocabulary of three whose tokens are 2, 5 and 7."""
    target = small_target()
    heads = small_heads(kind, target, draft_vocab=3)
    heads.set_draft_vocabulary(torch.tensor([2, 5, 7]))
    assert heads.draft_ids is not None and heads.draft_ids.tolist() == [2, 5, 7]
    ids = random_ids(6)
    taps, _ = read(target, heads.config.taps, ids[:, :5])
    seen = set()
    for budget, sampler in [
        (Budget.chain(3), None),
        (Budget(9, 3, 3), None),
        (Budget.static([(0,), (1,), (2,)]), None),
        (Budget.chain(3), Sampler()),
    ]:
        draft = heads.propose(started(heads, taps, ids), budget, sampler)
        seen |= set(draft.tokens)
        assert draft.ids is not None and draft.ids.tolist() == [2, 5, 7]
        if sampler:  # what cannot be drafted has no q
            full = draft.full_q(0, 64)
            assert full.nonzero()[:, 0].tolist() == [2, 5, 7] and float(full.sum()) == pytest.approx(1, abs=1e-6)
    assert seen == {2, 5, 7}
    logits = heads.grower(started(heads, taps, ids)).first()
    first = heads.propose(started(heads, taps, ids), Budget.chain(1)).tokens[0]
    assert logits.shape == (3,) and first == [2, 5, 7][int(logits.argmax())]


def test_a_map_is_refused_where_there_is_none_to_set() -> None:
    heads = small_heads("medusa", small_target())
    assert heads.draft_ids is None and "target_ids" not in heads.state_dict()
    with pytest.raises(ValueError, match="draft over the whole vocabulary: set draft_vocab_size"):
        heads.set_draft_vocabulary(torch.tensor([2, 5, 7]))
