"""One draw and one nucleus: the law, the edges, and agreement with transformers' own filter."""

from __future__ import annotations

import pytest
import torch
from transformers import TopPLogitsWarper

from heads.chance import draw, nucleus

IDS = torch.zeros(1, 1, dtype=torch.long)


def test_draws_follow_the_weights() -> None:
    weights = torch.tensor([0.0, 1.0, 0.0, 3.0, 4.0, 0.0])
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(6)
    for _ in range(8000):
        counts[draw(weights, generator)] += 1
    assert counts[[0, 2, 5]].sum() == 0
    expected = torch.tensor([1000.0, 3000.0, 4000.0])
    chi_square = ((counts[[1, 3, 4]] - expected) ** 2 / expected).sum()
    assert chi_square < 2 + 10 * (2 * 2) ** 0.5


def test_the_edges_of_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, index in ((0.0, 1), (1.0, 3), (1 - 2**-53, 3)):
        monkeypatch.setattr(torch, "rand", lambda *_, number=number, **__: torch.tensor([number], dtype=torch.float64))
        assert draw(torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0])) == index


def test_the_same_seed_gives_the_same_draws() -> None:
    weights = torch.rand(50, generator=torch.Generator().manual_seed(1))
    first, again = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
    assert [draw(weights, first) for _ in range(20)] == [draw(weights, again) for _ in range(20)]


@pytest.mark.parametrize("weights", [[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_weights_that_are_none(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="add up to"):
        draw(torch.tensor(weights))


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.99])
def test_the_nucleus_is_that_of_transformers(scale: float, top_p: float) -> None:
    """On random rows, from flat to peaked; flat ones may be left to the other implementation."""
    generator = torch.Generator().manual_seed(int(10 * scale))
    left = 0
    for _ in range(20):
        scores = torch.randn(1, 5000, generator=generator) * scale
        theirs = TopPLogitsWarper(top_p)(IDS, scores)[0].isfinite()
        ours = nucleus(scores[0].softmax(-1), top_p)
        if ours is None:
            left += 1
            continue
        assert set(ours.tolist()) == set(theirs.nonzero()[:, 0].tolist())
    if scale >= 3 and top_p <= 0.9:  # as a language model's are
        assert left < 8


def test_ties_at_the_border_are_left_open() -> None:
    assert nucleus(torch.tensor([0.4, 0.2, 0.2, 0.2]), 0.5) is None
    assert nucleus(torch.tensor([0.4, 0.2, 0.2, 0.2]), 0.3) is not None


def test_small_and_whole() -> None:
    certain = torch.tensor([0.0, 1.0, 0.0])
    assert nucleus(certain, 0.9).tolist() == [1]  # type: ignore[union-attr]
    assert nucleus(torch.tensor([0.5, 0.3, 0.2]), 0.0).tolist() == [0]  # type: ignore[union-attr]
