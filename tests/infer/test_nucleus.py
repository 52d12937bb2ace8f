"""Top-p without a sort keeps what transformers' own keeps, bit for bit, and knows when it cannot tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from infer import nucleus
from infer.nucleus import Nucleus, certain, quick

IDS: Any = torch.zeros(1, 1, dtype=torch.long)  # transformers names its arguments' types more narrowly


def row(seed: int, scale: float, coarse: bool = False) -> Any:
    """(1, 5000) scores; ``coarse``: rounded to bfloat16, where many are alike."""
    scores = scale * torch.randn(1, 5000, generator=torch.Generator().manual_seed(seed))
    return scores.bfloat16().float() if coarse else scores


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.5, 2.0, 4.0, 8.0]), st.floats(0, 0.999), st.booleans())
def test_the_same_tokens_stay(seed: int, scale: float, top_p: float, coarse: bool) -> None:
    scores = row(seed, scale, coarse)
    assert torch.equal(Nucleus(top_p)(IDS, scores), TopPLogitsWarper(top_p)(IDS, scores))


def test_most_rows_need_no_sort() -> None:
    assert sum(certain(row(seed, 4.0)[0], 0.9) is not None for seed in range(40)) == 40
    assert certain(row(0, 0.1)[0], 0.9) is None  # nearly flat: thousands of tokens stay


def at_the_border(share: float) -> Tensor:
    """(5000,) scores: 0.5, ``share``, then the rest spread evenly."""
    rest = (0.5 - share) / 4998
    return torch.tensor([0.5, share] + [rest] * 4998, dtype=torch.float64).log().float()


@pytest.mark.parametrize(
    ("scores", "top_p", "kept"),
    [
        (at_the_border(0.25), 0.6, [0, 1]),
        (at_the_border(0.25), 0.4, [0]),
        (at_the_border(0.25), 0.0, None),  # one stays, but the threshold is at the whole sum
        (at_the_border(0.25), 0.5 + 2e-6, None),  # whether the second stays hangs on rounding
        (at_the_border(0.25), 0.7505, None),  # a border among tokens that are alike
        (at_the_border(0.25).index_fill(0, torch.tensor([7]), float("nan")), 0.6, None),
        (at_the_border(0.25).index_fill(0, torch.tensor([7]), float("inf")), 0.6, None),
    ],
)
def test_what_is_certain(scores: Tensor, top_p: float, kept: list[int] | None) -> None:
    found = certain(scores, top_p)
    assert (None if found is None else found.tolist()) == kept


def test_a_border_without_care_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake of counting a token's own share twice keeps other tokens."""
    scores = row(1, 4.0)
    right = TopPLogitsWarper(0.9)(IDS, scores)
    assert torch.equal(Nucleus(0.9)(IDS, scores), right)
    monkeypatch.setattr(nucleus, "certain", lambda scores, top_p, least: certain(scores, 1 - 0.9 * (1 - top_p), least))
    assert not torch.equal(Nucleus(0.9)(IDS, scores), right)


def test_only_the_librarys_own_is_exchanged() -> None:
    class Mine(TopPLogitsWarper):
        pass

    given_ones = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9, -1.0, 3), Mine(0.5)])
    temperature, top_p, mine = quick(given_ones)
    assert temperature is given_ones[0] and mine is given_ones[2]
    assert (type(top_p), top_p.top_p, top_p.filter_value, top_p.min_tokens_to_keep) == (Nucleus, 0.9, -1.0, 3)
    assert torch.equal(top_p(IDS, row(2, 4.0)), given_ones[1](IDS, row(2, 4.0)))
