"""The public contract: what goes in, what comes out, what is refused and how."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, StoppingCriteria

import infer
from heads.base import DraftHeads
from heads.grow import Budget
from heads.kinds import build, make_config
from heads.target import Target, TargetMismatch
from infer.arguments import NOT_TAKEN, SETTINGS
from infer.drafters import NoDrafter
from tests.infer.fakes import FakeDrafter, Oracle
from tests.infer.test_stream import TOKENIZERS
from tests.tiny import tiny_model

PROMPT = torch.tensor([[7, 3, 44, 12]])


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", vocab=300)


def medusa(model: Any, lookahead: int = 3) -> DraftHeads:
    target = Target(model)
    return build(make_config("medusa", target, lookahead=lookahead), target).to(target.dtype)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_beams": 2},
        {"penalty_alpha": 0.6},
        {"dola_layers": "high"},
        {"guidance_scale": 1.5},
        {"cache_implementation": "quantized"},
        {"use_cache": False},
        {"prompt_lookup_num_tokens": 3},
        {"token_healing": True},
        {"output_attentions": True},
        {"output_hidden_states": True},
        {"prefill_chunk_size": 8},
        {"assistant_model": "other"},
        {"negative_prompt_ids": PROMPT},
        {"past_key_values": 1},
        {"inputs_embeds": PROMPT},
        {"synced_gpus": True},
    ],
)
def test_what_is_not_supported_is_named(model: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        infer.generate(model, PROMPT, max_new_tokens=3, **wrong)


def test_refusals_hold_for_the_models_own_config_too(model: Any) -> None:
    own = copy.deepcopy(model)
    own.generation_config.num_beams = 4
    with pytest.raises(ValueError, match="num_beams=4"):
        infer.generate(own, PROMPT, max_new_tokens=3)
    with pytest.raises(ValueError, match="num_beams=3"):
        infer.generate(model, PROMPT, generation_config=GenerationConfig(num_beams=3, max_new_tokens=3))


def test_neutral_values_pass(model: Any) -> None:
    """What a wrapper hands on without meaning it: every refused argument at None, settings at their defaults."""
    neutral: dict[str, Any] = dict.fromkeys(NOT_TAKEN)
    neutral |= {"num_beams": 1, "num_return_sequences": 1, "use_cache": True, "synced_gpus": False, "streamer": None}
    assert all(None in allowed for allowed, _ in SETTINGS.values())
    out = infer.generate(model, PROMPT, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, **neutral)
    assert torch.equal(out.sequences, model.generate(PROMPT, max_new_tokens=3, do_sample=False))


def test_unknown_arguments_name_the_nearest(model: Any) -> None:
    with pytest.raises(ValueError, match=r"'max_new_token'.*did you mean 'max_new_tokens'"):
        infer.generate(model, PROMPT, max_new_token=3)
    with pytest.raises(ValueError, match=r"'bugdet'.*did you mean 'budget'"):
        infer.generate(model, PROMPT, bugdet=Budget.chain(2))
    with pytest.raises(ValueError, match="zzz"):
        infer.stream(model, PROMPT, tokenizer=TOKENIZERS["bytes"], zzz=None)


def test_the_models_own_generation_config_applies(model: Any) -> None:
    own = copy.deepcopy(model)
    text = own.generate(PROMPT, max_new_tokens=12, do_sample=False)
    end = int(text[0, 8])
    own.generation_config.update(eos_token_id=[end, 299], pad_token_id=0, max_length=10, repetition_penalty=1.05)
    expected = own.generate(PROMPT, do_sample=False)
    assert torch.equal(infer.generate(own, PROMPT, Oracle(expected[0].tolist()), do_sample=False).sequences, expected)
    config = GenerationConfig(max_new_tokens=6, do_sample=False, no_repeat_ngram_size=2)
    expected = own.generate(PROMPT, generation_config=config)
    assert torch.equal(infer.generate(own, PROMPT, generation_config=config).sequences, expected)
    own.generation_config.update(do_sample=True, temperature=5.0)
    many = {tuple(infer.generate(own, PROMPT, seed=seed).sequences[0].tolist()) for seed in range(5)}
    assert len(many) > 1, "the model's own do_sample holds"


def test_twenty_tokens_by_default(model: Any) -> None:
    assert torch.equal(infer.generate(model, PROMPT).sequences, model.generate(PROMPT))


def test_prompts(model: Any) -> None:
    tokenizer = copy.deepcopy(TOKENIZERS["bytes"])
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:"
    text = infer.generate(model, "abc", tokenizer=tokenizer, max_new_tokens=3)
    assert text.sequences[0, :-3].tolist() == tokenizer("abc")["input_ids"]
    assert text.texts is not None and len(text.texts) == 1
    assert torch.equal(infer.generate(model, ["abc"], tokenizer=tokenizer, max_new_tokens=3).sequences, text.sequences)
    chat = [{"role": "user", "content": "hi"}]
    out = infer.generate(model, chat, tokenizer=tokenizer, max_new_tokens=3)
    assert out.sequences[0, :-3].tolist() == tokenizer("user:hi\nassistant:")["input_ids"]
    assert infer.generate(model, PROMPT, max_new_tokens=3).texts is None


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (torch.ones(3, dtype=torch.long), "LongTensor"),
        (torch.ones(1, 3), "LongTensor"),
        (torch.ones(1, 0, dtype=torch.long), "no tokens"),
        (torch.full((1, 3), 300), "outside the target's vocabulary"),
        (torch.full((1, 3), -1), "outside the target's vocabulary"),
        ([1, 2, 3], "prompt must be"),
        (None, "prompt must be"),
        ([], "prompt must be"),
    ],
)
def test_bad_prompts(model: Any, prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        infer.generate(model, prompt, tokenizer=TOKENIZERS["bytes"], max_new_tokens=3)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 1, 0, 1]], "left only"),
        ([[1, 1, 1, 0]], "left only"),
        ([[1, 1]], "where the prompt is"),
        ([[0] * 4], "left only"),
    ],
)
def test_bad_masks(model: Any, mask: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        infer.generate(model, PROMPT, attention_mask=torch.tensor(mask), max_new_tokens=3)


def test_text_needs_a_tokenizer(model: Any) -> None:
    for call in (lambda: infer.generate(model, "hi"), lambda: infer.stream(model, PROMPT)):
        with pytest.raises(ValueError, match="pass tokenizer="):
            call()
    with pytest.raises(ValueError, match="pass tokenizer="):
        infer.generate(model, PROMPT, stop_strings="x")
    with pytest.raises(ValueError, match="belongs to a prompt of token ids"):
        infer.generate(model, "hi", tokenizer=TOKENIZERS["bytes"], attention_mask=PROMPT)


def test_drafts(model: Any) -> None:
    heads = medusa(model)
    text = infer.generate(model, PROMPT, max_new_tokens=12, do_sample=False).sequences
    for draft in (None, "none", NoDrafter(), heads, Oracle(text[0].tolist())):
        out = infer.generate(model, PROMPT, draft, max_new_tokens=12, do_sample=False)
        assert torch.equal(out.sequences, text)
    assert infer.generate(model, PROMPT, heads, max_new_tokens=12).stats.log[0].depth == 3  # the look-ahead
    shallow = infer.generate(model, PROMPT, heads, max_new_tokens=12, budget=Budget.chain(1))
    assert max(r.depth for r in shallow.stats.log) == 1
    assert torch.equal(infer.generate(heads.target, PROMPT, heads, max_new_tokens=12).sequences, text)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ("heads", "needs heads"),
        ("lookup+heads", "needs heads"),
        ("head", "not known — did you mean 'heads'"),
        ("layers:0,9", "9"),
        (3, "spec string"),
    ],
)
def test_bad_drafts(model: Any, draft: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        infer.generate(model, PROMPT, draft, max_new_tokens=3)


def test_heads_of_another_target(model: Any) -> None:
    other = medusa(tiny_model("llama", vocab=300, seed=1))
    with pytest.raises(TargetMismatch, match="trained on"):
        infer.generate(model, PROMPT, other, max_new_tokens=3)
    same = medusa(tiny_model("llama", vocab=300))  # equal weights in another object
    assert infer.generate(model, PROMPT, same, max_new_tokens=3).stats.proposed > 0


class Stray(FakeDrafter):
    """Proposes an id the target does not have."""

    def draft(self, budget, sampler):  # type: ignore[no-untyped-def]
        from heads.draft import Draft

        return Draft.chain([300])


def test_a_drafter_that_leaves_the_vocabulary(model: Any) -> None:
    with pytest.raises(ValueError, match="outside the target's vocabulary"):
        infer.generate(model, PROMPT, Stray(), max_new_tokens=5)


def test_a_repository_brings_target_and_heads(tmp_path: Path) -> None:
    base = tiny_model("llama", vocab=300, dtype=torch.float32)
    base.save_pretrained(tmp_path / "target")
    tokenizer = TOKENIZERS["bytes"]
    tokenizer.save_pretrained(tmp_path / "target")
    target = Target.load(str(tmp_path / "target"), dtype=torch.float32)
    heads = build(make_config("medusa", target, lookahead=2), target)
    heads.save_pretrained(tmp_path / "heads")
    out = infer.generate(str(tmp_path / "heads"), "ab", max_new_tokens=6)
    assert out.stats.proposed > 0
    assert out.texts is not None
    again = infer.generate(tmp_path / "heads", "ab", draft="heads", max_new_tokens=6)
    assert torch.equal(out.sequences, again.sequences)
    assert "".join(infer.stream(tmp_path / "heads", "ab", max_new_tokens=6)) == out.texts[0]
    assert infer.generate(tmp_path / "heads", "ab", draft="none", max_new_tokens=6).stats.proposed == 0


class Ban(StoppingCriteria):
    """Stops at the first token above a limit; counts its calls and looks at the scores."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        assert len(scores) == self.calls
        return torch.tensor([input_ids.shape[1] >= 9])


def test_criteria_of_the_user(model: Any) -> None:
    text = model.generate(PROMPT, max_new_tokens=20, do_sample=False)[0].tolist()
    criterion = Ban()
    out = infer.generate(
        model,
        PROMPT,
        Oracle(text),
        max_new_tokens=20,
        do_sample=False,
        output_scores=True,
        stopping_criteria=[criterion],
    )
    assert out.sequences[0].tolist() == text[:9]
    assert criterion.calls == 5
    assert out.scores is not None and len(out.scores) == 5


def test_the_model_is_left_as_it_was(model: Any) -> None:
    own = copy.deepcopy(model)
    own.train()
    own.model.layers[0].eval()
    own(PROMPT, output_hidden_states=True)  # transformers hooks its layers for this, and leaves the hooks there
    hooks = [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in own.modules()]
    modes = [part.training for part in own.modules()]
    weights = {name: value.clone() for name, value in own.state_dict().items()}
    grads = [p.requires_grad for p in own.parameters()]
    config, generation = own.config.to_dict(), own.generation_config.to_dict()
    for kwargs in ({}, {"do_sample": True, "seed": 3}, {"num_beams": 2}, {"eos_token_id": 5, "temperature": 0.3}):
        try:
            infer.generate(own, PROMPT, medusa(model), max_new_tokens=6, **kwargs)
        except ValueError:
            assert "num_beams" in kwargs
    assert [part.training for part in own.modules()] == modes
    assert [p.requires_grad for p in own.parameters()] == grads
    assert own.config.to_dict() == config
    assert own.generation_config.to_dict() == generation
    assert all(torch.equal(value, weights[name]) for name, value in own.state_dict().items())
    assert [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in own.modules()] == hooks
    own(PROMPT).logits.sum().backward()  # and it can still be trained
