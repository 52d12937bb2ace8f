"""``model.generate(custom_generate=infer.custom_generate(…))``: transformers' own call, our loop, the same result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.generation import GenerateDecoderOnlyOutput

import infer
from heads.custom_generate.generate import generate as from_repository
from heads.grow import Budget
from tests.infer.fakes import Oracle, RandomTree
from tests.infer.test_greedy import Counting, greedy, random_heads
from tests.infer.test_stream import scripted
from tests.tiny import tiny_model

PROMPT = torch.tensor([[7, 3, 44, 12, 9, 30]])
BATCH = torch.tensor([[0, 0, 0, 7, 3, 44], [5, 7, 5, 7, 5, 7], [0, 0, 0, 0, 0, 9]])
MASK = (BATCH != 0).long()
NEW = 16


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", vocab=300)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "repetition": {"repetition_penalty": 1.4},
    "no repeat": {"no_repeat_ngram_size": 2},
    "ends": {"eos_token_id": [*range(0, 300, 7)], "pad_token_id": 0, "min_new_tokens": 3},
    "of the prompt": {"encoder_repetition_penalty": 1.4, "encoder_no_repeat_ngram_size": 2},
    "allowed": {"prefix_allowed_tokens_fn": lambda row, ids: [(int(ids[-1]) * 3 + k + row) % 300 for k in (1, 5, 9)]},
    "bias": {"sequence_bias": {(11,): -100.0, (7, 3): 9.0}, "bad_words_ids": [[20], [44, 12]]},
    "top 1": {"do_sample": True, "top_k": 1, "temperature": 0.7},
    "static cache": {"cache_implementation": "static"},
    "length": {"max_length": 12, "max_new_tokens": None},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("rows", ["one", "padded", "two of each"])
def test_returns_what_generate_returns(model: Any, name: str, rows: str) -> None:
    """Processors, criteria and settings arrive built, and are used as they are, row by row."""
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | SETTINGS[name]
    ids, mask = (PROMPT, torch.ones_like(PROMPT)) if rows == "one" else (BATCH, MASK)
    if rows == "two of each":
        settings |= {"num_return_sequences": 2, "do_sample": True, "top_k": 1}
    theirs = model.generate(ids, attention_mask=mask, **settings)
    for draft in ("none", random_heads(model, "medusa"), RandomTree(theirs[0].tolist())):
        if rows != "one" and isinstance(draft, RandomTree):
            continue
        fast = infer.custom_generate(draft, budget=Budget(rows=6, depth=3, width=2))
        ours = model.generate(ids, attention_mask=mask, custom_generate=fast, **settings)
        assert isinstance(ours, Tensor)
        assert torch.equal(ours, theirs)


def test_a_dictionary_with_scores_and_logits(model: Any) -> None:
    asked: dict[str, Any] = {
        "max_new_tokens": NEW,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "repetition_penalty": 1.4,
        "attention_mask": MASK,
        "pad_token_id": 0,
    }
    theirs: Any = model.generate(BATCH, **asked)
    ours: Any = model.generate(BATCH, custom_generate=infer.custom_generate("none"), **asked)
    assert all(type(out) is GenerateDecoderOnlyOutput for out in (ours, theirs))
    assert torch.equal(ours.sequences, theirs.sequences)
    for mine, wanted in ((ours.scores, theirs.scores), (ours.logits, theirs.logits)):
        assert len(mine) == len(wanted) == NEW
        for a, b in zip(mine, wanted, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    short = model.generate(
        BATCH,
        custom_generate=infer.custom_generate("none"),
        **(asked | {"output_scores": False, "output_logits": False}),
    )
    assert short.scores is None and short.logits is None


def test_the_users_processors_and_criteria_are_asked_once_a_token(model: Any) -> None:
    text = greedy(model, PROMPT, max_new_tokens=NEW, logits_processor=[Counting()])
    state = Counting()
    fast = infer.custom_generate(RandomTree(text))
    ours = model.generate(PROMPT, custom_generate=fast, max_new_tokens=NEW, do_sample=False, logits_processor=[state])
    assert ours[0].tolist() == text
    assert state.calls == NEW


def test_stop_strings_and_a_stream(model: Any) -> None:
    scripted_model, tokenizer, script, say = scripted("é😀 and so on")
    prompt = torch.tensor([[1, 2]])
    asked: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False, "logits_processor": [say]}
    theirs = scripted_model.generate(prompt, stop_strings=["and", "zz"], tokenizer=tokenizer, **asked)
    pieces: list[str] = []
    fast = infer.custom_generate(
        Oracle(script, ()), tokenizer=tokenizer, stop_strings=["and", "zz"], stream=pieces.append
    )
    ours = scripted_model.generate(prompt, custom_generate=fast, **asked)
    assert torch.equal(ours, theirs)
    assert "".join(pieces) == "é😀 and"
    other: list[str] = []
    fast = infer.custom_generate(Oracle(script, ()), tokenizer=tokenizer)
    scripted_model.generate(
        prompt, custom_generate=fast, stream=other.append, eos_token_id=256, pad_token_id=0, **asked
    )
    assert "".join(other) == "é😀 and so on"
    with pytest.raises(ValueError, match="stop_strings need a tokenizer"):
        infer.custom_generate("none", stop_strings="x")


def test_a_seed_of_the_function_or_of_the_call(model: Any) -> None:
    asked: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": True, "temperature": 1.5}
    heads = random_heads(model, "medusa")
    one = model.generate(PROMPT, custom_generate=infer.custom_generate(heads, seed=3), **asked)
    two = model.generate(PROMPT, custom_generate=infer.custom_generate(heads), seed=3, **asked)
    assert torch.equal(one, two)
    assert torch.equal(one, infer.generate(model, PROMPT, heads, seed=3, **asked).sequences)
    assert not torch.equal(one, model.generate(PROMPT, custom_generate=infer.custom_generate(heads), seed=4, **asked))


def test_prefixes_are_recalled_across_calls(model: Any) -> None:
    cache = infer.PrefixCache()
    fast = infer.custom_generate("lookup", prefix_cache=cache)
    asked: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    first = model.generate(PROMPT, custom_generate=fast, **asked)
    longer = torch.cat([first, torch.tensor([[5, 6]])], 1)
    assert torch.equal(model.generate(longer, custom_generate=fast, **asked), model.generate(longer, **asked))
    assert cache.reused == first.shape[1] - 1


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"cache": DynamicCache()}, "cache is not supported"),
        ({"position_ids": torch.arange(6)[None] + 3}, "position_ids"),
        ({"token_type_ids": PROMPT}, "token_type_ids"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    ],
)
def test_what_is_not_supported_is_named(model: Any, wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        model.generate(
            PROMPT, custom_generate=infer.custom_generate("none"), max_new_tokens=3, do_sample=False, **wrong
        )


def test_a_rule_that_is_not_known_is_refused_before_any_call() -> None:
    with pytest.raises(ValueError, match="typical"):
        infer.custom_generate("none", rule="typical")


def test_the_model_is_left_as_it_was(model: Any) -> None:
    heads = random_heads(model, "medusa")
    model.train()
    model.model.layers[1].eval()
    modes = [part.training for part in model.modules()]
    model.generate(PROMPT, custom_generate=infer.custom_generate(heads), max_new_tokens=3)
    after = [part.training for part in model.modules()]
    model.eval()
    assert after == modes


def test_an_adapter_stays_on() -> None:
    from peft import LoraConfig, get_peft_model

    base = tiny_model("llama", vocab=300)
    tuned = get_peft_model(base, LoraConfig(target_modules=["q_proj"], r=4, init_lora_weights=False)).double()
    text = tuned.generate(input_ids=PROMPT, max_new_tokens=NEW, do_sample=False)
    fast = infer.custom_generate(random_heads(tuned, "medusa"))
    assert torch.equal(
        tuned.generate(input_ids=PROMPT, custom_generate=fast, max_new_tokens=NEW, do_sample=False), text
    )


def test_the_file_of_a_repository_takes_other_drafts_and_batches(model: Any, tmp_path: Any) -> None:
    """What lies beside pushed heads: same text for a padded batch, and the heads joined with lookup."""
    random_heads(model, "medusa").save_pretrained(tmp_path)
    asked: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": MASK, "pad_token_id": 0}
    theirs = model.generate(BATCH, **asked)
    for draft in (None, "lookup+heads", "none"):
        ours = from_repository(model, BATCH, heads=str(tmp_path), draft=draft, **asked)
        assert torch.equal(ours, theirs)
