"""The local engine continues prompts with a draft as it does without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import infer
from heads.base import DraftHeads
from heads.target import Target
from infer import completer as module
from infer.completer import LocalCompleter
from tests.heads.small import STORED, memorized, small_heads, small_target

PROMPTS = [[7, 3, 44], [9], [5, 61, 7, 8, 22, 10, 11, 3, 2], [4, 4, 4, 4, 4, 4]]
NEW = 16
END = (5,)


@pytest.fixture(scope="module")
def target() -> Target:
    return small_target()


@pytest.fixture(scope="module")
def heads(target: Target) -> DraftHeads:
    """Heads that have learned one of the texts by heart, and guess at the others."""
    text = target.model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=NEW, do_sample=False)[0].tolist()
    return memorized(STORED["medusa"], target, text, steps=60)


def engine(target: Target, draft: Any = None, ends: tuple[int, ...] = END) -> LocalCompleter:
    return LocalCompleter(target.model, ends, batch_size=3, draft=draft)


def ending(target: Target) -> tuple[int, ...]:
    """An end token that comes up in the second text, in the middle."""
    said = engine(target, ends=(63,)).complete(PROMPTS, max_new_tokens=NEW)[1].ids
    return (said[NEW // 2],)


def test_greedy_continuations_are_the_same_with_heads(target: Target, heads: DraftHeads) -> None:
    ends = ending(target)
    plain = engine(target, ends=ends).complete(PROMPTS, max_new_tokens=NEW)
    assert {len(done.ids) for done in plain} > {NEW} and {done.finished for done in plain} == {True, False}
    for draft in (heads, small_heads("eagle", target, draft_vocab=20), "lookup:1"):
        assert engine(target, draft, ends).complete(PROMPTS, max_new_tokens=NEW) == plain


def test_it_takes_fewer_passes(target: Target, heads: DraftHeads) -> None:
    passes: list[int] = []
    hook = target.layers[0].register_forward_pre_hook(lambda *_: passes.append(1))
    try:
        engine(target, heads, (63,)).complete(PROMPTS[:1], max_new_tokens=NEW)
    finally:
        hook.remove()
    assert len(passes) < NEW - 3


def test_draws_follow_from_the_seed_and_leave_the_generator_alone(target: Target, heads: DraftHeads) -> None:
    drawing: dict[str, Any] = {"max_new_tokens": NEW, "temperature": 1.0}
    torch.manual_seed(3)
    before = torch.get_rng_state()
    once, again, other = (engine(target, heads).complete(PROMPTS, seed=seed, **drawing) for seed in (1, 1, 2))
    assert once == again != other
    assert torch.equal(torch.get_rng_state(), before)


def test_a_forgotten_mask_shows(target: Target, heads: DraftHeads, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = engine(target).complete(PROMPTS, max_new_tokens=NEW)

    def careless(*arguments: Any, attention_mask: Any, **settings: Any) -> Any:
        return infer.generate(*arguments, **settings)

    monkeypatch.setattr(module, "generate", careless)
    assert engine(target, heads).complete(PROMPTS, max_new_tokens=NEW) != plain
