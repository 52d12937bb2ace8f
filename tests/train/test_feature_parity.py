"""States that heads are trained on are those that they decode on: the same taps at the same positions, to rounding.

Training reads a conversation in one pass; decoding reads it in a prompt and many short passes over a cache, with drafts
that are mostly thrown away. Bounds are 1e-10 of the largest value in float64 and 1e-5 in float32; an off-by-one in
tap, position or mask exceeds them a thousandfold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.draft import Draft
from heads.grow import Budget, Sampler
from heads.target import Target
from infer.generate import generate
from tests.tiny import tiny_model
from train.features import run_target
from train.storage import Storage

BOUND = {torch.float64: 1e-10, torch.float32: 1e-5}
FAMILIES = ["llama", "qwen3", "gpt2", "gptneox", "mixtral"]
CASES = [(family, dtype) for family in FAMILIES for dtype in BOUND]
CASES += [("gemma2", torch.float32)]  # whose norms compute in float32 whatever the dtype
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


class Recorder:
    """A drafter that keeps the taps it is given, and drafts trees of which some paths are right and most are wrong."""

    lookahead = 3
    module_seconds = 0.0

    def __init__(self, taps: tuple[int, ...], truth: list[int]) -> None:
        self.taps, self.truth = taps, truth
        self.seen: list[Tensor] = []
        self.rounds = 0

    def begin(self, target: Target, ids: Tensor, taps: Tensor | None) -> None:
        assert taps is not None
        self.vocab, self.length = target.vocab_size, ids.shape[1]
        self.seen.append(taps)

    def propose(self, budget: Budget, sampler: Sampler | None) -> Draft:
        """A wrong token, and beside it the truth for as many tokens as the round's number says."""
        self.rounds += 1
        right = self.truth[self.length : self.length + self.rounds % 4]
        wrong = (self.truth[min(self.length, len(self.truth) - 1)] + 1) % self.vocab
        parents = [-1, *(at or -1 for at in range(len(right)))]  # the wrong token, then a chain of right ones
        return Draft((wrong, *right), tuple(parents), (None,) * len(parents))

    def commit(self, taps: Tensor | None, ids: list[int]) -> None:
        assert taps is not None
        self.length += len(ids)
        self.seen.append(taps)

    def fork(self) -> Recorder:
        return Recorder(self.taps, self.truth)


def made(family: str, dtype: torch.dtype) -> Target:
    return Target(tiny_model(family, dtype=dtype))


def decoded(target: Target, taps: tuple[int, ...], tokens: int = 24) -> tuple[Tensor, Tensor]:
    """Ids (1, n) of a text and the taps (n', taps·H) that a drafter saw of it, in order."""
    ids = torch.tensor([PROMPT])
    options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False}
    truth = generate(target.model, ids, None, **options).sequences
    recorder = Recorder(taps, truth[0].tolist())
    text = generate(target.model, ids, recorder, budget=Budget(rows=8, depth=4, width=2), **options).sequences
    assert torch.equal(text, truth)
    assert recorder.rounds < tokens - 3  # some drafts were right
    return text, torch.cat(recorder.seen, 1)[0]


def trained(target: Target, taps: tuple[int, ...], ids: Tensor) -> Tensor:
    """Taps (n, taps·H) as training computes them."""
    storage = Storage(len(taps), target.hidden_size, target.dtype)
    return run_target(target, taps, ids, torch.ones_like(ids, dtype=torch.bool), storage)["taps"][0]


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_decoding_reads_the_states_of_training(family: str, dtype: torch.dtype) -> None:
    target = made(family, dtype)
    taps = (0, 1, target.num_layers - 1, target.num_layers)
    text, seen = decoded(target, taps)
    assert len(seen) >= text.shape[1] - 2  # all but what the last round left
    assert distance(trained(target, taps, text)[: len(seen)], seen) < BOUND[dtype]


def other_tap(target: Target, taps: tuple[int, ...], text: Tensor) -> Tensor:
    return trained(target, tuple(tap + 1 for tap in taps), text)


def other_row(target: Target, taps: tuple[int, ...], text: Tensor) -> Tensor:
    return trained(target, taps, text).roll(1, 0)


def other_position(target: Target, taps: tuple[int, ...], text: Tensor) -> Tensor:
    positions = torch.arange(text.shape[1])[None] + (torch.arange(text.shape[1]) >= len(PROMPT))
    out = target.forward(text, taps=taps, positions=positions).taps
    assert out is not None
    return out[0]


def other_mask(target: Target, taps: tuple[int, ...], text: Tensor) -> Tensor:
    n = text.shape[1]
    seen = torch.ones(n, n, dtype=torch.bool).tril()
    seen[len(PROMPT) :, 2] = False
    out = target.forward(text, taps=taps, mask=seen[None, None]).taps
    assert out is not None
    return out[0]


@pytest.mark.parametrize("mistake", [other_tap, other_row, other_position, other_mask])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_mistake_is_seen_a_thousandfold(
    mistake: Callable[[Target, tuple[int, ...], Tensor], Tensor], dtype: torch.dtype
) -> None:
    target = made("llama", dtype)
    text, seen = decoded(target, (1, 2, 3))
    assert distance(mistake(target, (1, 2, 3), text)[: len(seen)], seen) > 1000 * BOUND[dtype]
