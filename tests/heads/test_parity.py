"""What was trained is what drafts: the training unroll and real decoding give the same states and logits.

Both sides run over the same text. The unroll drafts at every row at once with the text's own tokens; decoding starts,
drafts and advances as a generation does, with drafted tokens forced where the text must be followed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.draft import Draft
from heads.grow import Budget
from heads.judge import TrainingBatch
from tests.heads.parity import BOUND, CASES, LENGTH, LOOKAHEAD, Seen, decoded, make, text_for, unrolled
from tests.heads.small import batch_of, number, random_ids, read, relative, small_target, soft_ce

ROUNDS = [2, 0, 4, 1, 3]  # none, some, all of a draft


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("case", CASES)
def test_unroll_and_decoding_agree(case: str, dtype: torch.dtype) -> None:
    target = small_target(dtype=dtype)
    heads = make(CASES[case], target)
    ids = text_for(heads)
    batch = batch_of(target, heads.config.taps, ids)
    whole = unrolled(heads, batch)
    assert len(whole.logits) == (LENGTH - 2) * LOOKAHEAD, "every row at every draft position"
    # a prompt of every length, drafted from at once
    for prompt in (1, 2, 7, LENGTH - LOOKAHEAD - 1):
        taps, _ = read(target, heads.config.taps, ids[:, : prompt + 1])
        assert decoded(heads, ids, taps, [0], prompt=prompt).worst(whole, LOOKAHEAD) <= BOUND[dtype]
    # and round after round, with nothing but chains, and with trees between them
    assert decoded(heads, ids, batch.taps, ROUNDS).worst(whole, 18) <= BOUND[dtype]
    assert decoded(heads, ids, batch.taps, ROUNDS, between=True).worst(whole, 10) <= BOUND[dtype]


@dataclass
class Watched:
    """A grower that keeps the logits of each node (by its path of tokens) on their way through."""

    grower: Any
    logits: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def first(self) -> Tensor:
        self.logits[()] = self.grower.first()
        return self.logits[()]

    def after(self, nodes: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        found: Tensor = self.grower.after(nodes, tokens, parents)
        draft = Draft(tuple(tokens), tuple(parents), (None,) * len(tokens))
        for node, logits in zip(nodes, found, strict=True):
            self.logits[tuple(draft.tokens[i] for i in draft.path(node))] = logits
        return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("budget", [Budget(14, LOOKAHEAD, 3), Budget.static([(0,), (1,), (0, 0), (1, 1), (1, 1, 0)])])
@pytest.mark.parametrize("case", CASES)
def test_each_path_of_a_tree_is_a_text_that_was_trained(
    case: str, budget: Budget, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = small_target(dtype=dtype)
    heads = make(CASES[case], target)
    ids, last = text_for(heads), 9
    taps, _ = read(target, heads.config.taps, ids)
    watched: list[Watched] = []

    def grower(state: Any, original: Callable[[Any], Any] = heads.grower) -> Watched:
        watched.append(Watched(original(state)))
        return watched[-1]

    monkeypatch.setitem(heads.__dict__, "grower", grower)
    state = heads.start(taps[:, :5], ids[:, :6])
    heads.propose(state, budget)
    heads.advance(state, taps[:, 5 : last + 1], ids[:, 6 : last + 2])
    heads.propose(state, budget)
    found = watched[-1].logits
    assert len(found) >= 3 and max(map(len, found)) >= 2
    worst = 0.0
    for path, logits in found.items():
        text = torch.cat([ids[:, : last + 2], torch.tensor([path], dtype=torch.long), ids[:, :4]], 1)
        there = torch.full((1, text.shape[1], taps.shape[2]), 7.0, dtype=dtype)  # what no drafter may look at
        there[:, : last + 1] = taps[:, : last + 1]
        batch = batch_of(target, heads.config.taps, text)
        batch.taps = there
        worst = max(worst, relative(logits, unrolled(heads, batch).logits[last, len(path)]))
    assert worst <= BOUND[dtype]


@pytest.mark.parametrize("case", CASES)
def test_other_texts_padding_and_untrained_rows_change_nothing(case: str) -> None:
    target = small_target()
    heads = make(CASES[case], target)
    texts = [text_for(heads, length, seed) for length, seed in ((24, 1), (17, 2), (9, 3))]
    masks = [random_ids(text.shape[1], seed=9, vocab=2).bool() for text in texts]
    alone = [batch_of(target, heads.config.taps, text) for text in texts]

    def pad(values: Sequence[Tensor], filler: float) -> Tensor:
        rows = [value.new_full((1, LENGTH, *value.shape[2:]), filler) for value in values]
        for row, value in zip(rows, values, strict=True):
            row[:, : value.shape[1]] = value
        return torch.cat(rows)

    together = TrainingBatch(
        ids=pad(texts, 0),
        loss_mask=pad(masks, 0),
        mask=pad([one.mask for one in alone], 0),
        **{name: pad([getattr(one, name) for one in alone], 1) for name in ("taps", "hidden", "top", "lse")},
    )
    for text, one in enumerate(alone):
        ours, theirs = unrolled(heads, together, text), unrolled(heads, one)
        rows = {row for row in range(one.ids.shape[1] - 2) if masks[text][0, row + 2]}
        assert {row for row, _ in ours.logits} == rows
        kept = Seen(
            {key: value for key, value in ours.states.items() if sum(key) + 2 < one.ids.shape[1]},
            {key: value for key, value in ours.logits.items() if sum(key) + 2 < one.ids.shape[1]},
        )
        assert kept.worst(theirs, 1) <= 1e-10


@pytest.mark.parametrize("case", ["medusa draft vocabulary", "eagle", "eagle 3.1", "block", "block own output"])
def test_the_gradient_goes_through_every_step(case: str) -> None:
    """Nothing is detached between steps: the gradient is the slope of the loss, along random directions."""
    target = small_target()
    heads = make(CASES[case], target)
    batch = batch_of(target, heads.config.taps, text_for(heads), random_ids(LENGTH, seed=4, vocab=2).bool())
    parameters = list(heads.parameters())
    assert all(parameter.requires_grad for parameter in parameters)
    heads.loss(batch, soft_ce).total.backward()
    for seed in range(2):
        random = torch.Generator().manual_seed(seed)
        way = [torch.randn(p.shape, generator=random, dtype=p.dtype) for p in parameters]
        slope = sum(float((p.grad * w).sum()) for p, w in zip(parameters, way, strict=True) if p.grad is not None)
        ends = []
        for step in (1e-6, -2e-6, 1e-6):
            with torch.no_grad():
                for parameter, direction in zip(parameters, way, strict=True):
                    parameter.add_(step * direction)
                ends.append(number(heads.loss(batch, soft_ce, measure=False).total))
        assert slope == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5)
