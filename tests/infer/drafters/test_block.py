"""Decoding with block heads: the target's own text in every family, and its law when chains end by confidence."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import infer
from heads.base import DraftHeads
from heads.draft import Draft
from heads.grow import Budget
from heads.target import Target
from infer.verify import RULES, Chooser
from tests.heads.small import small_heads
from tests.infer.exact import Drawing, Make, Text, World, check_law, drafts_of
from tests.tiny import tiny_model

PROMPTS = [[7, 3, 44], [9], [5, 61, 7, 8, 22, 10, 11, 3, 2]]
BUDGETS = {"chain": Budget.chain(4), "tree": Budget(10, 4, 3), "static": Budget.static([(0,), (1,), (0, 0), (1, 0)])}
NEW = 24


def block(model: Any, **options: Any) -> DraftHeads:
    """Random heads of four slots."""
    return small_heads("block", Target(model), lookahead=4, draft_vocab=40, **options)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_three_ragged_prompts_get_the_targets_greedy_text(family: str, budget: str) -> None:
    model = tiny_model(family)
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS])
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    stop = {"confidence": True, "stop_below": 0.2} if budget == "chain" else {}
    out = infer.generate(model, ids, block(model, **stop), attention_mask=mask, budget=BUDGETS[budget], **settings)
    for at, prompt in enumerate(PROMPTS):
        alone = model.generate(torch.tensor([prompt]), **settings)[0].tolist()
        assert out.sequences[at, width - len(prompt) :].tolist() == alone
    assert out.stats.tokens == 3 * NEW


def test_right_drafts_are_accepted_and_wrong_ones_replaced() -> None:
    """Heads whose bias knows the text: whole blocks are accepted where it is right, and it is right now and then."""
    model = tiny_model("llama")
    ids = torch.tensor([PROMPTS[2]])
    text = model.generate(ids, max_new_tokens=NEW, do_sample=False)[0].tolist()
    made = small_heads("block", Target(model), lookahead=4, markov_rank=64)
    with torch.no_grad():
        weights = dict(made.named_parameters())
        weights["markov.w1.weight"].copy_(torch.eye(64))
        weights["markov.w2.weight"].zero_()
        for before, token in pairwise(text):
            weights["markov.w2.weight"][token, before] = 1e4
    out = infer.generate(model, ids, made, max_new_tokens=NEW, do_sample=False)
    assert out.sequences[0].tolist() == text
    assert 1.2 < out.stats.tokens_per_round <= 5


# sampling


def drawing(world: World, stop_below: float, *, draw: bool = True, floors: tuple[float, ...] = ()) -> Make:
    """Chains of real block heads over the world's tokens, drawn by a chooser."""
    target = Target(tiny_model("llama", vocab=world.vocab))
    made = small_heads("block", target, markov_rank=8, confidence=True, stop_below=stop_below, seed=2)
    taps = torch.randn(1, 3, 96, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def make(chooser: Chooser, text: Text) -> Draft:
        state = made.start(taps, torch.tensor([[0, 0, 0, text[-1]]]))
        return made.propose(state, Budget(4, 3, floors=floors), Drawing(chooser) if draw else None)

    return make


def lengths(make: Make, world: World) -> set[int]:
    return {len(draft) for text in world.contexts() for _, draft in drafts_of(make, text)}


@pytest.mark.parametrize("rule", ["token", "block", "traversal"])
@pytest.mark.parametrize("stop_below", [0.0, 0.25])
def test_the_law_of_sampled_chains_is_the_targets(rule: str, stop_below: float) -> None:
    world = World(3, seed=1)
    make = drawing(world, stop_below)
    assert lengths(make, world) == ({3} if not stop_below else {0, 1, 2, 3})
    check_law(RULES[rule], make, world, 5, rejected=0.2)


@pytest.mark.parametrize("rule", ["token", "block", "traversal"])
def test_the_law_of_chains_that_end_by_the_controls_floors(rule: str) -> None:
    world = World(3, seed=1)
    make = drawing(world, 0.0, floors=(0.3, 0.25, 0.2))
    assert lengths(make, world) == {0, 1, 2, 3}
    check_law(RULES[rule], make, world, 5, rejected=0.2)


@pytest.mark.parametrize("rule", ["siblings", "token", "block"])
def test_the_law_of_chosen_chains_is_the_targets(rule: str) -> None:
    world = World(3, seed=1)
    make = drawing(world, 0.25, draw=False)
    assert len(lengths(make, world)) > 1
    check_law(RULES[rule], make, world, 5, rejected=0.2)


@pytest.mark.parametrize("rule", ["token", "block", "traversal"])
def test_ending_a_chain_by_what_was_drawn_would_show(rule: str) -> None:
    """The mistake that the rule of confidence avoids: an unlikely last token is dropped after all."""
    world = World(3, seed=1)
    honest = drawing(world, 0.0)

    def make(chooser: Chooser, text: Text) -> Draft:
        draft = honest(chooser, text)
        keep = next((node for node, q in enumerate(draft.q) if _unlikely(q, draft.tokens[node])), len(draft))
        return draft.shorten(nodes=keep)

    with pytest.raises(AssertionError, match="largest difference"):
        check_law(RULES[rule], make, world, 5)


def _unlikely(q: Tensor | None, token: int) -> bool:
    assert q is not None
    return float(q[token]) < 0.3
