"""What block heads tell of their own drafts: how it is learned, that drafting tells the same, where chains end."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch.nn import functional

from heads.grow import Budget
from tests.heads.parity import Forced, text_for
from tests.heads.small import batch_of, random_ids, soft_ce
from tests.heads.test_block import random_block, started


def test_confidence_learns_the_overlap_and_teaches_the_drafts_nothing() -> None:
    made = random_block(confidence=True, confidence_weight=0.5, own_output=True)
    batch = batch_of(made.target, made.config.taps, random_ids(14), random_ids(14, seed=4, vocab=2).bool())
    report = made.loss(batch, soft_ce, measure=False)
    assert report.accepted.tolist() == [0] * 4 and report.overlap.tolist() == [0.0] * 4
    total = torch.zeros((), dtype=torch.float64)
    for j, step in enumerate(made.unroll(batch)):
        term = torch.zeros((), dtype=torch.float64)
        for n, row in enumerate(step.row.tolist()):
            if row + 2 + j < 14 and batch.loss_mask[0, row + 2 + j]:
                p = made.target.project(batch.hidden[0, row + 1 + j]).softmax(-1)
                overlap = torch.minimum(p, step.logits[n].softmax(-1)).sum().detach()
                assert step.confidence is not None
                term = term + 0.5 * functional.binary_cross_entropy_with_logits(step.confidence[n], overlap)
        assert float(report.terms["confidence"][j]) == pytest.approx(float(term.detach()), rel=1e-6)
        total = total + 0.8**j * term
    parameters = dict(made.named_parameters())
    alone: tuple[torch.Tensor | None, ...] = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    nothing = made.loss(batch, lambda draft, teacher: {"none": 0.0 * draft.sum(-1)}).total
    through: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
        nothing, list(parameters.values()), allow_unused=True
    )
    for name, mine, wanted in zip(parameters, through, alone, strict=True):
        if wanted is None:
            assert name in ("lm_head.weight", "markov.w2.weight")
            assert mine is not None and not mine.any()
        else:
            assert mine is not None and torch.allclose(mine, wanted, rtol=1e-5, atol=1e-7), name


def test_confidence_is_the_same_in_training_and_in_drafting() -> None:
    made = random_block(confidence=True, stop_below=1e-9)
    ids = text_for(made, 24)
    batch = batch_of(made.target, made.config.taps, ids)
    with torch.no_grad():
        told = [step.confidence for step in made.unroll(batch)]
    for prompt in (1, 8):
        state = made.start(batch.taps[:, :prompt], ids[:, : prompt + 1])
        chances: list[float | None] = []
        with torch.no_grad():
            grower = made.grower(state)
            grower.first()
            chances.append(grower.chance())
            for node in range(3):
                tokens = ids[0, prompt + 1 : prompt + 2 + node].tolist()
                grower.after([node], tokens, list(range(-1, node)))
                chances.append(grower.chance())
        for j, chance in enumerate(chances):
            logits = told[j]
            assert logits is not None
            assert chance == pytest.approx(float(logits[prompt - 1].sigmoid()), rel=1e-6)


def test_a_chain_ends_before_its_chance_falls_below_the_threshold() -> None:
    made = random_block(confidence=True, stop_below=1e-9)
    state, _ = started(made)
    whole = made.propose(state, Budget.chain(4))
    grower = made.grower(state)
    with torch.no_grad():
        grower.first()
        told = [grower.chance()]
        for node in range(3):
            grower.after([node], whole.tokens, whole.parents)
            told.append(grower.chance())
    assert whole.trust == tuple(told)
    chances = list(accumulate(told, lambda a, b: a * b))
    assert chances == sorted(chances, reverse=True) and len(set(chances)) == 4
    for kept, chance in enumerate(chances):
        made.config.options["stop_below"] = chance * 1.0001
        assert made.propose(state, Budget.chain(4)).tokens == whole.tokens[:kept]
        made.config.options["stop_below"] = 0.0
        budget = Budget(5, 4, floors=(0.0,) * kept + (chance * 1.0001,))
        assert made.propose(state, budget).tokens == whole.tokens[:kept], "the control's floors do the same"
        assert made.propose(state, Budget(5, 4, floors=(chance * 0.9999,) * (kept + 1))) == whole
        made.config.options["stop_below"] = chance * 0.9999
        assert len(made.propose(state, Budget.chain(4))) >= kept + 1
        forced = Forced(list(whole.tokens))
        assert made.propose(state, Budget.chain(4), forced).tokens[: kept + 1] == whole.tokens[: kept + 1]
    made.config.options["stop_below"] = 1.0
    assert len(made.propose(state, Budget.chain(4))) == 0
    assert len(made.propose(state, Budget(12, 4, 3))) == 11, "trees are cut by their scores"
