"""Text that went on past its end, or stopped short of it: ends inside blocks, exact counts, the last piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import infer
from heads.grow import Budget
from infer.stream import decode
from tests.infer.test_greedy import greedy, random_heads
from tests.infer.test_stream import Script, scripted
from tests.tiny import tiny_model

PROMPT = torch.tensor([[7, 3, 44, 12, 9]])


@pytest.mark.parametrize("draft", ["medusa", "eagle", "lookup", "layers:0-1"])
def test_any_token_may_be_the_end(draft: str) -> None:
    """Each token of the greedy text in turn is declared an end: the text ends with it, on any draft, rows apart."""
    model = tiny_model("llama")
    drafter = random_heads(model, draft) if draft in ("medusa", "eagle") else draft
    text = greedy(model, PROMPT, max_new_tokens=16)
    batch = torch.cat([PROMPT, PROMPT.flip(1)])
    for token in dict.fromkeys(text[PROMPT.shape[1] :]):
        settings: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": token, "pad_token_id": 0}
        out = infer.generate(model, PROMPT, drafter, **settings)
        assert out.sequences[0].tolist() == greedy(
            model, PROMPT, **{k: settings[k] for k in settings if k != "do_sample"}
        )
        assert int(out.sequences[0, -1]) == token
        rows = infer.generate(model, batch, drafter, **settings)
        assert torch.equal(rows.sequences, model.generate(batch, **settings))


@pytest.mark.parametrize("count", range(1, 13))
def test_as_many_tokens_as_asked_for_and_the_chat_goes_on(count: int) -> None:
    """What is kept for the next turn is what was returned, however far the last draft reached."""
    model = tiny_model("llama")
    for drafter in (random_heads(model, "medusa"), "lookup"):
        cache = infer.PrefixCache()
        out = infer.generate(model, PROMPT, drafter, max_new_tokens=count, do_sample=False, prefix_cache=cache)
        assert out.sequences.shape[1] == PROMPT.shape[1] + count == cache.tokens + 1
        assert out.stats.tokens == count
        turn = torch.cat([out.sequences, torch.tensor([[50, 51]])], 1)
        on = infer.generate(model, turn, drafter, max_new_tokens=8, do_sample=False, prefix_cache=cache)
        assert on.stats.reused == cache.reused == out.sequences.shape[1] - 1
        assert on.sequences[0].tolist() == greedy(model, turn, max_new_tokens=8)


def test_asking_for_nothing_is_refused_as_transformers_refuses_it() -> None:
    model = tiny_model("llama")
    for call in (model.generate, lambda ids, **kwargs: infer.generate(model, ids, "lookup", **kwargs)):
        with pytest.raises(ValueError, match="max_new_tokens"):
            call(PROMPT, max_new_tokens=0)


@pytest.mark.parametrize("depth", [1, 2, 3, 5, 8, 20])
def test_a_stream_is_the_text_when_the_end_stands_in_the_last_block(depth: int) -> None:
    """Two characters of six bytes, and the end drafted with them: nothing is lost, nothing is shown half."""
    model, tokenizer, script, say = scripted("é😀")
    settings: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": 256, "do_sample": False, "tokenizer": tokenizer}
    settings |= {"logits_processor": [say], "budget": Budget.chain(depth)}
    prompt = torch.tensor([[1, 2]])
    pieces = list(infer.stream(model, prompt, Script([*script, 65, 66]), **settings))
    out = infer.generate(model, prompt, Script([*script, 65, 66]), **settings)
    assert out.sequences[0].tolist() == script
    assert "".join(pieces) == decode(tokenizer, script[2:]) == "é😀"
    assert not any("\ufffd" in piece for piece in pieces)
