"""Greedy decoding where others' outputs changed: many prompts, every draft, near-ties, penalties, the last position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import infer
from heads.grow import Budget
from heads.target import Target
from infer.cache import ForgettingCache
from infer.decode import PositionLimit
from infer.drafters.draft_model import DraftModelDrafter
from infer.rounding import first_difference, logit_noise
from tests.infer.fakes import Broken, Oracle, RandomTree, Wrong
from tests.infer.test_greedy import greedy, random_heads
from tests.tiny import tiny_model

SHAPES = [
    Budget.chain(1),
    Budget.chain(4),
    Budget.static([(0,), (1,), (2,), (3,)]),
    Budget.static([(0,), (0, 0), (1,), (0, 1), (0, 0, 0), (1, 0), (2,)]),
    Budget(rows=6, depth=4, width=2),
    Budget(rows=20, depth=4, width=4),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_fifty_prompts_whatever_the_tree_and_the_heads(dtype: torch.dtype) -> None:
    """25 in each dtype; heads that are random, wrong, right or NaN, in every shape: the choice changes nothing."""
    model = tiny_model("llama", layers=3, dtype=dtype)
    prompts = torch.randint(64, (25, 12), generator=torch.Generator().manual_seed(dtype.itemsize))
    texts = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=64, do_sample=False)
    kinds = {
        "random": lambda text, at: random_heads(model, "medusa").to(dtype),
        "trained on nothing": lambda text, at: random_heads(model, "eagle").to(dtype),
        "wrong": lambda text, at: Wrong(text),
        "right": lambda text, at: Oracle(text),
        "nan": lambda text, at: Broken(text, seed=at),
        "mixed": lambda text, at: RandomTree(text, seed=at),
    }
    different = []
    for at, text in enumerate(texts.tolist()):
        kind = list(kinds)[at % len(kinds)]
        budget = SHAPES[(at // len(kinds) + at) % len(SHAPES)]
        out = infer.generate(
            model, prompts[at : at + 1], kinds[kind](text, at), max_new_tokens=64, do_sample=False, budget=budget
        )
        if out.sequences[0].tolist() != text:
            different.append((at, kind, budget))
    assert not different


def answers(model: Any, prompts: Tensor, draft: Any) -> list[tuple[Tensor, list[int], list[int]]]:
    """For each prompt: it, transformers' answer, ours."""
    found = []
    for prompt in prompts.split(1):
        theirs = greedy(model, prompt, max_new_tokens=64)[prompt.shape[1] :]
        out = infer.generate(
            model, prompt, draft(prompt[0].tolist() + theirs), max_new_tokens=64, do_sample=False, budget=SHAPES[5]
        )
        found.append((prompt, theirs, out.sequences[0, prompt.shape[1] :].tolist()))
    return found


def test_in_bfloat16_only_near_ties_flip_and_each_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """First place, both tokens and the gap of their logits, below the target's own noise; a planted bug is above it."""
    model = tiny_model("llama", layers=3, dtype=torch.bfloat16)
    target = Target(model)
    prompts = torch.randint(64, (4, 9), generator=torch.Generator().manual_seed(1))
    found = answers(model, prompts, lambda text: RandomTree(text))
    noise = logit_noise(target, [(prompt, theirs) for prompt, theirs, _ in found], rows=20)
    for prompt, theirs, ours in found:
        difference = first_difference(target, prompt, ours, theirs)
        if difference is not None:
            assert (difference.ours, difference.theirs) == (ours[difference.position], theirs[difference.position])
            assert difference.gap <= noise
    keep = ForgettingCache.keep

    def forgetful(self: ForgettingCache, bases: Any, paths: Any) -> None:  # the last accepted node is lost
        keep(self, bases, [[*path[:-1], path[-2]] if len(path) > 2 else path for path in paths])

    monkeypatch.setattr(ForgettingCache, "keep", forgetful)
    gaps = [
        difference.gap
        for prompt, theirs, ours in answers(model, prompts, lambda text: RandomTree(text))
        if (difference := first_difference(target, prompt, ours, theirs)) is not None
    ]
    assert max(gaps) > noise


def test_in_float32_nothing_flips() -> None:
    model = tiny_model("llama", layers=3, dtype=torch.float32)
    prompts = torch.randint(64, (6, 9), generator=torch.Generator().manual_seed(1))
    assert all(theirs == ours for _, theirs, ours in answers(model, prompts, lambda text: RandomTree(text)))


@pytest.mark.parametrize("draft", ["right", "tree", "lookup", "medusa", "layers:0-1"])
def test_penalties_and_a_least_length_with_a_likely_end(draft: str) -> None:
    """The end of sequence is what greedy decoding says third; it must wait for the eighth token."""
    model = tiny_model("llama", layers=3)
    prompt = torch.tensor([[5, 9, 5, 9, 5, 9, 33]])
    settings: dict[str, Any] = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "pad_token_id": 0}
    end = greedy(model, prompt, max_new_tokens=3, **settings)[-1]
    settings |= {"eos_token_id": end, "max_new_tokens": 40}
    short = greedy(model, prompt, **settings)
    assert len(short) == prompt.shape[1] + 3
    settings["min_new_tokens"] = 8
    text = greedy(model, prompt, **settings)
    assert len(text) >= prompt.shape[1] + 8
    drafts = {"right": Oracle(text), "tree": RandomTree(text), "medusa": random_heads(model, "medusa")}
    out = infer.generate(model, prompt, drafts.get(draft, draft), do_sample=False, **settings)
    assert out.sequences[0].tolist() == text


@pytest.mark.parametrize(
    "draft", ["right", "eagle", "medusa", "lookup", "layers:0-1", "a model with half the positions"]
)
def test_drafts_end_with_the_targets_positions(draft: str) -> None:
    """64 positions, a prompt of 10 and 54 new tokens: all of them, and then one clear error."""
    model = tiny_model("llama", layers=3, max_position_embeddings=64)
    prompt = torch.arange(10)[None]
    text = greedy(model, prompt, max_new_tokens=54)
    small = tiny_model("llama", layers=2, seed=1, max_position_embeddings=32)
    drafts = {
        "right": lambda: Oracle([*text, *[0] * 9]),
        "eagle": lambda: random_heads(model, "eagle"),
        "medusa": lambda: random_heads(model, "medusa"),
        "a model with half the positions": lambda: DraftModelDrafter(small),
    }
    drafter = drafts.get(draft, lambda: draft)()
    out = infer.generate(model, prompt, drafter, max_new_tokens=54, do_sample=False)
    assert out.sequences[0].tolist() == text
    for ids, new in ((prompt, 60), (torch.arange(64)[None], 2)):
        with pytest.raises(PositionLimit, match="has 64 positions"):
            infer.generate(model, ids, drafter, max_new_tokens=new, do_sample=False)
