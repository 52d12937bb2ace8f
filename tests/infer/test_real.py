"""The embedded target in float32: same text as ``model.generate``, streamed whole, with drafts good and bad."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import infer
from heads.grow import Budget
from heads.kinds import build, make_config
from tests.infer.fakes import RandomTree
from tests.tiny import real_target

CHAT = [{"role": "user", "content": "Name three colours and a 😀 for each, one a line."}]


@pytest.mark.real
def test_the_real_target_says_what_it_always_said() -> None:
    target = real_target(torch.float32)
    settings: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    plain = infer.generate(target, CHAT, **settings)
    prompt = plain.sequences[:, : -plain.stats.tokens]
    assert torch.equal(plain.sequences, target.model.generate(prompt, **settings))
    assert plain.texts == [target.tokenizer().decode(plain.sequences[0, prompt.shape[1] :], skip_special_tokens=True)]

    text = plain.sequences[0].tolist()
    good = infer.generate(
        target, prompt, RandomTree(text, vocab=target.vocab_size), budget=Budget(rows=8, depth=3), **settings
    )
    assert torch.equal(good.sequences, plain.sequences)
    assert good.stats.tokens_per_round > 1.5

    heads = build(make_config("eagle", target, lookahead=2), target).to(target.dtype)
    tree = Budget(rows=5, depth=2, width=2)
    pieces = list(infer.stream(target, CHAT, heads, budget=tree, **settings))
    assert "".join(pieces) == plain.texts[0]
    assert len(pieces) > 4
