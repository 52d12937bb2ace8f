"""Greedy text equals ``model.generate``'s, token by token, in float64: families × drafts × trees × settings."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import infer
from heads.base import DraftHeads
from heads.grow import Budget
from heads.kinds import build, make_config
from heads.target import Target
from infer.cache import ForgettingCache
from infer.decode import Decoding, PositionLimit
from infer.drafters import Drafter
from infer.stopping import Stop
from tests.infer.fakes import Broken, Oracle, RandomTree, Wrong
from tests.tiny import FAMILIES, tiny_model

NEW = 28
PROMPT = torch.tensor([[7, 3, 44, 12, 9, 30, 21, 5, 60]])
CONFIGS: dict[str, dict[str, Any]] = {name: {} for name in FAMILIES} | {
    "mistral, window 8": {"sliding_window": 8},
    "qwen2, window 8": {
        "sliding_window": 8,
        "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "llama, eager": {"attn_implementation": "eager"},
    "llama, tied": {"tie_word_embeddings": True},
}


@cache
def model_of(name: str) -> Any:
    overrides = dict(CONFIGS[name])
    attention = overrides.pop("attn_implementation", None)
    model = tiny_model(name.split(",")[0], **overrides)
    if attention:
        model.set_attn_implementation(attention)
    return model


@cache
def answer(name: str) -> list[int]:
    return greedy(model_of(name), max_new_tokens=NEW)


def greedy(model: Any, ids: Tensor = PROMPT, **settings: Any) -> list[int]:
    out: list[int] = model.generate(ids, do_sample=False, **settings)[0].tolist()
    return out


def random_heads(model: Any, kind: str, ruin: bool = False) -> DraftHeads:
    target = Target(model)
    taps = None if kind == "medusa" else (1, 2, 3)
    heads = build(make_config(kind, target, lookahead=4, taps=taps), target).double()
    for parameter in heads.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
        if ruin:
            parameter.data.fill_(float("nan"))
    return heads


DRAFTS: dict[str, Any] = {
    "none": lambda model, text: "none",
    "oracle": lambda model, text: Oracle(text),
    "wrong": lambda model, text: Wrong(text),
    "random tree": lambda model, text: RandomTree(text),
    "nan scores": lambda model, text: Broken(text, seed=1),
    "medusa": lambda model, text: random_heads(model, "medusa"),
    "eagle": lambda model, text: random_heads(model, "eagle"),
    "nan medusa": lambda model, text: random_heads(model, "medusa", ruin=True),
    "nan eagle": lambda model, text: random_heads(model, "eagle", ruin=True),
}
TREE = Budget(rows=12, depth=4, width=3)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("draft", DRAFTS)
def test_every_family_with_every_draft(name: str, draft: str) -> None:
    model, text = model_of(name), answer(name)
    out = infer.generate(model, PROMPT, DRAFTS[draft](model, text), max_new_tokens=NEW, do_sample=False, budget=TREE)
    assert out.sequences[0].tolist() == text
    assert out.stats.tokens == NEW == 1 + sum(r.emitted for r in out.stats.log)
    if draft == "oracle":
        assert out.stats.rounds == -(-(NEW - 1) // 5)  # five tokens a round, the last one cut short
    if draft in ("none", "wrong"):
        assert out.stats.tokens_per_round == 1


SHAPES = {
    "chain": Budget.chain(4),
    "one": Budget.chain(1),
    "wide": Budget.static([(0,), (1,), (2,), (3,)]),
    "medusa's": Budget.static([(0,), (0, 0), (1,), (0, 1), (0, 0, 0), (1, 0), (2,), (0, 0, 1)]),
    "deep and narrow": Budget.static([(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0), (1,)]),
    "by confidence": Budget(rows=20, depth=4, width=4),
    "nothing": Budget(rows=1, depth=0),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_every_tree_of_real_heads(shape: str, kind: str) -> None:
    model, text = model_of("llama"), answer("llama")
    heads = random_heads(model, kind)
    out = infer.generate(model, PROMPT, heads, max_new_tokens=NEW, do_sample=False, budget=SHAPES[shape])
    assert out.sequences[0].tolist() == text
    assert max(r.proposed for r in out.stats.log) <= SHAPES[shape].rows - 1


SETTINGS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "no repeat": {"no_repeat_ngram_size": 2},
    "least length": {"min_new_tokens": 8, "eos_token_id": 5},
    "all three": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 8, "eos_token_id": [5, 9]},
    "bias": {"sequence_bias": {(11,): -100.0, (7, 3): 9.0}},
    "bad words": {"bad_words_ids": [[11], [7, 3]]},
    "suppressed": {"suppress_tokens": [1, 2], "begin_suppress_tokens": [40]},
    "forced end": {"forced_eos_token_id": 5, "eos_token_id": 5},
    "decay": {"exponential_decay_length_penalty": (5, 1.2), "eos_token_id": 5},
    "of the prompt": {"encoder_repetition_penalty": 1.4, "encoder_no_repeat_ngram_size": 2},
    "allowed": {"prefix_allowed_tokens_fn": lambda row, ids: [int(ids[-1] + k) % 64 for k in (1, 5, 9)]},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_processors_see_the_simulated_prefix(setting: str) -> None:
    model, settings = model_of("llama"), SETTINGS[setting]
    text = greedy(model, max_new_tokens=NEW, pad_token_id=0, **settings)
    for draft in (Oracle(text), RandomTree(text), "none"):
        out = infer.generate(
            model, PROMPT, draft, max_new_tokens=NEW, do_sample=False, budget=TREE, pad_token_id=0, **settings
        )
        assert out.sequences[0].tolist() == text


class Counting:
    """A logits processor that keeps a state: it bans, at its k-th call, the token k."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, self.calls % 64] = float("-inf")
        self.calls += 1
        return scores


def test_a_processor_with_a_state_sees_each_emitted_token_once() -> None:
    model = model_of("llama")
    text = greedy(model, max_new_tokens=NEW, logits_processor=[Counting()])
    state = Counting()
    out = infer.generate(
        model, PROMPT, RandomTree(text), max_new_tokens=NEW, do_sample=False, budget=TREE, logits_processor=[state]
    )
    assert out.sequences[0].tolist() == text
    assert state.calls == NEW


@pytest.mark.parametrize("place", range(12))
def test_every_token_in_turn_declared_the_end(place: int) -> None:
    """An end of sequence inside a draft ends the text there."""
    model, text = model_of("llama"), answer("llama")
    end = text[PROMPT.shape[1] + place]
    for eos in (end, [end, 63]):
        expected = greedy(model, max_new_tokens=NEW, eos_token_id=eos, pad_token_id=0)
        for draft in (Oracle(text), RandomTree(text)):
            out = infer.generate(
                model, PROMPT, draft, max_new_tokens=NEW, do_sample=False, eos_token_id=eos, pad_token_id=0
            )
            assert out.sequences[0].tolist() == expected
            assert expected[-1] == end
            assert out.stats.tokens == len(expected) - PROMPT.shape[1]


@pytest.mark.parametrize("count", range(1, 13))
def test_exactly_as_many_tokens_as_asked_for(count: int) -> None:
    """Exactly as many as asked for, drafts or not."""
    model, text = model_of("llama"), answer("llama")
    for draft in (Oracle(text), RandomTree(text), random_heads(model, "medusa")):
        out = infer.generate(model, PROMPT, draft, max_new_tokens=count, do_sample=False)
        assert out.sequences[0].tolist() == text[: PROMPT.shape[1] + count]
        longer = infer.generate(model, PROMPT, draft, max_length=PROMPT.shape[1] + count, do_sample=False)
        assert torch.equal(out.sequences, longer.sequences)
        again = infer.generate(model, out.sequences, draft, max_new_tokens=4, do_sample=False)  # go on with the chat
        assert again.sequences[0].tolist() == text[: PROMPT.shape[1] + count + 4]


def test_no_tokens_is_refused_as_transformers_does() -> None:
    model = model_of("llama")
    with pytest.raises(ValueError, match="max_new_tokens"):
        model.generate(PROMPT, max_new_tokens=0)
    with pytest.raises(ValueError, match="max_new_tokens"):
        infer.generate(model, PROMPT, max_new_tokens=0)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_up_to_the_last_position_and_no_further(family: str) -> None:
    """Drafts do not reach past the positions the target has; the text may fill them all."""
    size: dict[str, Any] = {"n_positions" if family == "gpt2" else "max_position_embeddings": 64}
    model = tiny_model(family, **size)
    prompt = torch.arange(10)[None]
    text = greedy(model, prompt, max_new_tokens=54)
    for draft in (Oracle(text + [0] * 9), random_heads(model, "medusa")):
        out = infer.generate(model, prompt, draft, max_new_tokens=54, do_sample=False)
        assert out.sequences[0].tolist() == text
        pieces: list[int] = []
        with pytest.raises(PositionLimit, match="64 positions"):
            infer.generate(model, prompt, draft, max_new_tokens=60, do_sample=False, streamer=Collect(pieces))
        assert pieces[:64] == text
        with pytest.raises(PositionLimit, match="64 positions"):
            infer.generate(model, torch.arange(64)[None] % 60, draft, max_new_tokens=4, do_sample=False)
        with pytest.raises(ValueError, match="64 positions"):
            infer.generate(model, torch.arange(70)[None] % 60, draft, max_new_tokens=4, do_sample=False)


class Collect:
    """A streamer of transformers' kind."""

    def __init__(self, into: list[int]) -> None:
        self.into = into

    def put(self, value: Tensor) -> None:
        self.into += value.flatten().tolist()

    def end(self) -> None:
        pass


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}])
def test_left_padding(name: str, settings: dict[str, Any]) -> None:
    """Padded on the left, as given by the mask or recognised by the pad token."""
    model = model_of(name)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), PROMPT], 1)
    mask = (padded != 0).long()
    text = greedy(model, padded, attention_mask=mask, max_new_tokens=NEW, **settings)
    plain = greedy(model, max_new_tokens=NEW, **settings)
    for given in ({"attention_mask": mask}, {"pad_token_id": 0}):
        draft: Drafter = RandomTree(plain)
        out = infer.generate(
            model, padded, draft, max_new_tokens=NEW, do_sample=False, budget=TREE, **given, **settings
        )
        assert out.sequences[0].tolist() == text


def test_adapters_stay_on() -> None:
    """A LoRA target verifies with its adapter."""
    from peft import LoraConfig, get_peft_model

    base = tiny_model("llama")
    plain = greedy(base, max_new_tokens=NEW)
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)).double()
    text = greedy(model, max_new_tokens=NEW)
    assert text != plain
    for draft in (Oracle(text), RandomTree(text), random_heads(model, "medusa")):
        out = infer.generate(model, PROMPT, draft, max_new_tokens=NEW, do_sample=False, budget=TREE)
        assert out.sequences[0].tolist() == text


def test_bigger_than_the_cache_was_at_first() -> None:
    target, text = Target(model_of("llama")), answer("llama")
    decoding = Decoding(
        target, PROMPT, RandomTree(text), TREE, Stop(len(text)), cache=ForgettingCache(target, capacity=2)
    )
    assert [token for tokens in decoding.run() for token in tokens] == text[PROMPT.shape[1] :]


def test_float32_is_exact_too() -> None:
    model = tiny_model("llama", dtype=torch.float32)
    text = greedy(model, max_new_tokens=NEW)
    for draft in (Oracle(text), RandomTree(text)):
        out = infer.generate(model, PROMPT, draft, max_new_tokens=NEW, do_sample=False, budget=TREE)
        assert out.sequences[0].tolist() == text
