"""Encoder-decoder targets: exactly what ``model.generate`` says, whoever drafts, and in law when sampled."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import infer
from heads.grow import Budget, Sampler
from infer.cache import ForgettingCache
from infer.decode import Decoding, PositionLimit
from infer.drafters.seq2seq_model import Seq2SeqDrafter
from infer.seq2seq import Seq2SeqTarget, Source
from infer.stopping import Stop
from tests.infer.fakes import Branching, Oracle, Wrong, enumerate_law
from tests.tiny import SEQ2SEQ, tiny_model, tiny_seq2seq

NEW = 40  # further than T5's biases tell distances apart
PROMPTS = {
    "nine": torch.tensor([[7, 3, 44, 12, 9, 30, 21, 5, 60]]),
    "one": torch.tensor([[33]]),
    "fifty": torch.arange(2, 52)[None],
}
PROMPT = PROMPTS["nine"]


@cache
def model_of(family: str) -> Any:
    return tiny_seq2seq(family)


@cache
def smaller(family: str) -> Any:
    return tiny_seq2seq(family, layers=1, encoder=1, seed=3)


def greedy(model: Any, prompt: Tensor = PROMPT, **settings: Any) -> Tensor:
    settings.setdefault("max_new_tokens", NEW)
    return model.generate(prompt, do_sample=False, **settings)


def decoded(model: Any, draft: Any, prompt: Any = PROMPT, **settings: Any) -> infer.Generation:
    settings.setdefault("max_new_tokens", NEW)
    return infer.generate(model, prompt, draft, do_sample=False, **settings)


DRAFTS: dict[str, Any] = {
    "none": lambda model, text: "none",
    "oracle": lambda model, text: Oracle(text, ()),
    "wrong": lambda model, text: Wrong(text, ()),
    "itself": lambda model, text: Seq2SeqDrafter(model),
    "smaller": lambda model, text: Seq2SeqDrafter(smaller(model.config.model_type), lookahead=3),
    "lookup": lambda model, text: "lookup:1",
    "a decoder alone": lambda model, text: infer.drafters.draft_model.DraftModelDrafter(tiny_model("llama", layers=1)),
}


@pytest.mark.parametrize("family", SEQ2SEQ)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_that_of_generate(family: str, prompt: str) -> None:
    model = model_of(family)
    text = greedy(model, PROMPTS[prompt])
    for name, make in DRAFTS.items():
        out = decoded(model, make(model, text[0].tolist()), PROMPTS[prompt])
        assert torch.equal(out.sequences, text), name
        assert out.stats.tokens == NEW
        if name == "oracle":
            assert out.stats.rounds == -(-(NEW - 1) // 5)
        if name == "itself":
            assert out.stats.rounds == -(-(NEW - 1) // 6)  # it knows what the target will say
        if name in ("none", "wrong"):
            assert out.stats.tokens_per_round == 1


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_padding_of_the_prompt_is_what_generate_makes_of_it(family: str) -> None:
    """On either side; an encoder-decoder does not recognise it by the padding token, it must be masked."""
    model = model_of(family)
    pad = torch.ones(1, 3, dtype=torch.long)
    for padded in (torch.cat([PROMPT, pad], 1), torch.cat([pad, PROMPT], 1)):
        seen = []
        for given in ({}, {"attention_mask": (padded != 1).long()}):
            text = greedy(model, padded, **given)
            for draft in (Oracle(text[0].tolist(), ()), Seq2SeqDrafter(smaller(family))):
                assert torch.equal(decoded(model, draft, padded, **given).sequences, text)
            seen.append(text)
        assert not torch.equal(*seen)


SETTINGS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "of the prompt": {"encoder_repetition_penalty": 1.4, "encoder_no_repeat_ngram_size": 1},
    "least length": {"min_new_tokens": 8, "eos_token_id": [9, 46]},
    "forced": {"forced_bos_token_id": 7, "forced_eos_token_id": 9, "eos_token_id": 9},
    "bias": {"sequence_bias": {(11,): -100.0, (7, 3): 9.0}},
}


@pytest.mark.parametrize("family", SEQ2SEQ)
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_mean_what_they_mean_to_generate(family: str, setting: str) -> None:
    model, settings = model_of(family), SETTINGS[setting]
    text = greedy(model, **settings)
    for draft in (Oracle(text[0].tolist(), ()), Seq2SeqDrafter(smaller(family))):
        assert torch.equal(decoded(model, draft, **settings).sequences, text)


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_every_token_in_turn_declared_the_end_and_every_length(family: str) -> None:
    model = model_of(family)
    text = greedy(model, max_new_tokens=12)[0].tolist()
    for place in range(1, 13):
        expected = greedy(model, eos_token_id=text[place], max_new_tokens=12)
        out = decoded(model, Oracle(text, ()), eos_token_id=text[place], max_new_tokens=12)
        assert torch.equal(out.sequences, expected) and expected[0, -1] == text[place]
        out = decoded(model, Oracle(text, ()), max_new_tokens=place)
        assert out.sequences[0].tolist() == text[: place + 1]
        assert torch.equal(decoded(model, "none", max_new_tokens=None, max_length=place + 1).sequences, out.sequences)


def test_up_to_the_last_position_of_the_decoder() -> None:
    model = tiny_seq2seq("bart", max_position_embeddings=24)
    text = greedy(model, max_new_tokens=24)
    for draft in (Oracle(text[0].tolist(), ()), Seq2SeqDrafter(smaller("bart")), Seq2SeqDrafter(model)):
        assert torch.equal(decoded(model, draft, max_new_tokens=24).sequences, text)
        with pytest.raises(PositionLimit, match="24 positions"):
            decoded(model, draft, max_new_tokens=30)


def test_a_decoder_deeper_than_its_encoder() -> None:
    """transformers' own cache has too few layers for it (5.24); without a cache it says the same."""
    model = tiny_seq2seq("t5", layers=3, encoder=1)
    text = greedy(model, use_cache=False, max_new_tokens=16)
    for draft in ("none", Oracle(text[0].tolist(), ()), Seq2SeqDrafter(smaller("t5"))):
        assert torch.equal(decoded(model, draft, max_new_tokens=16).sequences, text)


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_scores_and_logits_are_those_of_generate(family: str) -> None:
    model = model_of(family)
    wanted: dict[str, Any] = {"output_scores": True, "output_logits": True, "repetition_penalty": 1.3}
    theirs = model.generate(PROMPT, do_sample=False, max_new_tokens=12, return_dict_in_generate=True, **wanted)
    ours = decoded(model, Seq2SeqDrafter(smaller(family)), max_new_tokens=12, **wanted)
    assert ours.scores is not None and ours.logits is not None
    for a, b in zip((*ours.scores, *ours.logits), (*theirs.scores, *theirs.logits), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_several_prompts_and_answers_each_as_it_would_be_alone(family: str) -> None:
    model = model_of(family)
    ids = torch.tensor([[7, 3, 44, 12], [1, 1, 9, 5]])
    text = greedy(model, ids)
    out = decoded(model, Seq2SeqDrafter(smaller(family)), ids)
    assert torch.equal(out.sequences, text) and [s.tokens for s in out.row_stats] == [NEW, NEW]
    settings: dict[str, Any] = {"do_sample": True, "max_new_tokens": 12}
    both = infer.generate(
        model, PROMPT, Seq2SeqDrafter(smaller(family)), seed=[3, 4], num_return_sequences=2, **settings
    )
    for row, seed in enumerate((3, 4)):
        alone = infer.generate(model, PROMPT, Seq2SeqDrafter(smaller(family)), seed=seed, **settings)
        assert torch.equal(alone.sequences[0], both.sequences[row])
    assert not torch.equal(both.sequences[0], both.sequences[1])


def test_a_spec_string_names_a_smaller_encoder_decoder(tmp_path: Path) -> None:
    model_of("t5").save_pretrained(tmp_path)
    model = model_of("t5")
    text = greedy(model)
    out = decoded(model, f"model:{tmp_path}")
    assert torch.equal(out.sequences, text)
    assert all(r.accepted == r.proposed for r in out.stats.log)
    assert sum(r.draft_seconds for r in out.stats.log) > 0


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_a_rejected_draft_left_in_the_cache_would_show(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: what was rejected stays."""
    model = model_of(family)
    text = greedy(model)
    monkeypatch.setattr(ForgettingCache, "keep", lambda self, bases, paths: None)
    assert not torch.equal(decoded(model, Wrong(text[0].tolist(), ())).sequences, text)


@torch.inference_mode()
@pytest.mark.parametrize("family", SEQ2SEQ)
def test_passes_of_any_size_give_the_logits_of_one_pass(family: str) -> None:
    """Biases and positions after a rollback; a prompt exchanged under the cross-attention shows."""
    model = model_of(family)
    text = greedy(model)[:, :30]
    whole = model(PROMPT, decoder_input_ids=text).logits[0]
    target = Seq2SeqTarget(model).read(Source(PROMPT, torch.ones_like(PROMPT)))
    kept, at = ForgettingCache(target), 0
    for size in (1, 4, 1, 6, 3, 8):
        rows = torch.cat([text[:, at : at + size], torch.tensor([[5, 5]])], 1)  # two that will be rejected
        out = target.forward(rows, cache=kept, positions=torch.arange(at, at + size + 2)[None])
        assert (out.logits[0, :size] - whole[at : at + size]).abs().max() <= 1e-10 * whole.abs().max()
        kept.keep([at], [list(range(size))])
        at += size
    other = Seq2SeqTarget(model).read(Source(PROMPT.flip(1), torch.ones_like(PROMPT)))
    far = other.forward(text, cache=ForgettingCache(other)).logits[0]
    assert (far - whole).abs().max() > 1e-3 * whole.abs().max()


# the law


class Asked(Sampler):
    """Draws drafts by the chooser's script."""

    def __init__(self, chooser: Branching) -> None:
        super().__init__()
        self.chooser = chooser

    def __call__(self, logits: Tensor) -> tuple[int, Tensor]:
        q = logits.float().softmax(-1)
        return self.chooser.sample(q), q


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_sampled_text_has_the_law_of_the_target(family: str) -> None:
    """All branches of drafting and deciding, over three tokens and three places, with a draft that is often wrong."""
    vocab, length = 3, 3
    model = tiny_seq2seq(family, vocab=vocab, layers=1, encoder=1)
    small = tiny_seq2seq(family, vocab=vocab, layers=1, encoder=1, seed=5)
    source = Source(torch.tensor([[2, 0, 2]]), torch.ones(1, 3, dtype=torch.long))
    target, drafter = Seq2SeqTarget(model).read(source), Seq2SeqDrafter(small)
    rejected = drafted = 0.0

    def run(chooser: Branching) -> tuple[int, ...]:
        nonlocal rejected, drafted
        decoding = Decoding(
            target=target,
            ids=torch.tensor([[0]]),
            drafter=drafter,
            budget=Budget.chain(2),
            stop=Stop(1 + length),
            do_sample=True,
            chooser=chooser,
            sampler=Asked(chooser),
        )
        text = tuple(token for tokens in decoding.run() for token in tokens)
        log = [r for r in decoding.stats.log if r.proposed]
        rejected += chooser.weight * sum(r.accepted < r.proposed for r in log)
        drafted += chooser.weight * len(log)
        return text

    law = enumerate_law(run)
    for text in product(range(vocab), repeat=length):
        ids = torch.tensor([[0, *text[:-1]]])
        with torch.no_grad():
            p = model(source.ids, decoder_input_ids=ids).logits[0].float().softmax(-1, dtype=torch.float64)
        expected = float(torch.stack([p[at, token] for at, token in enumerate(text)]).prod())
        assert law.get(text, 0.0) == pytest.approx(expected, abs=1e-6)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-9)
    assert rejected / drafted >= 0.3
