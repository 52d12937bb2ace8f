"""``stable=True``: in bfloat16 too, texts and logits do not depend on the draft, and the model is left as it was."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import infer
from heads.draft import Draft
from heads.grow import Budget, Sampler
from heads.masks import STABLE_ATTENTION
from heads.target import Target
from infer import stable
from infer.stable import attention, fixed_rows, stable_passes
from tests.infer.fakes import Oracle, RandomTree
from tests.tiny import FAMILIES, real_target, tiny_model

PROMPT = torch.tensor([[7, 3, 44, 12, 9, 30, 21, 5, 60]])
NEW = 24
TREE = Budget(rows=8, depth=4, width=2)  # RandomTree draws a shape of its own within it
DIRECT = ("falcon",)  # calls torch's attention itself


class Ragged(Oracle):
    """Chains of any length, some tokens wrong."""

    def __init__(self, text: Sequence[int], seed: int = 0) -> None:
        super().__init__(text)
        self.random = random.Random(seed)

    def draft(self, budget: Budget, sampler: Sampler | None) -> Draft:
        right = self.answer[len(self.text) :][: self.random.randint(0, budget.depth)]
        return Draft.chain([token if self.random.random() < 0.8 else (token + 1) % 64 for token in right])


def drafts(text: list[int], vocab: int = 64) -> dict[str, tuple[Any, Budget]]:
    return {
        "oracle chain": (Oracle(text), Budget.chain(7)),
        "ragged chain": (Ragged(text), Budget.chain(7)),
        "tree": (RandomTree(text, vocab=vocab), TREE),
    }


def decode(
    model: Any, drafter: Any = "none", budget: Budget | None = None, prompt: torch.Tensor = PROMPT, **settings: Any
) -> infer.Generation:
    settings = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True} | settings
    return infer.generate(model, prompt, drafter, budget=budget, **settings)


def same(ours: infer.Generation, plain: infer.Generation) -> bool:
    """Every bit of every token's logits."""
    assert ours.logits is not None and plain.logits is not None
    return torch.equal(ours.sequences, plain.sequences) and all(map(torch.equal, ours.logits, plain.logits))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in DIRECT])
def test_every_bit_is_the_same_whatever_the_draft(family: str) -> None:
    model = tiny_model(family, dtype=torch.bfloat16, layers=3)
    plain = decode(model, stable=True)
    text = plain.sequences[0].tolist()
    chain, ragged, tree = (decode(model, *each, stable=True) for each in drafts(text).values())
    assert same(chain, plain) and same(ragged, plain)
    assert chain.stats.tokens_per_round > 4, "an oracle's drafts are accepted"
    assert same(tree, plain)
    assert tree.stats.tokens_per_round > 1


def test_without_it_bits_depend_on_the_draft() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    plain = decode(model)
    others = [decode(model, *each) for each in drafts(plain.sequences[0].tolist()).values()]
    assert not all(same(other, plain) for other in others)


def test_fixed_rows_alone_are_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's own attention the number of keys reaches the bits, where there are many."""
    model = tiny_model("llama", dtype=torch.bfloat16, layers=3)
    prompt = torch.randint(0, 64, (1, 150), generator=torch.Generator().manual_seed(1))

    def all_the_same() -> bool:
        plain = decode(model, stable=True, prompt=prompt)
        others = drafts(plain.sequences[0].tolist()).values()
        return all(same(decode(model, *each, stable=True, prompt=prompt), plain) for each in others)

    assert all_the_same()
    monkeypatch.setattr(stable, "STABLE_ATTENTION", "sdpa")
    assert not all_the_same()


def test_in_float64_the_text_is_that_of_model_generate() -> None:
    model = tiny_model("gemma2", dtype=torch.float64)
    text = model.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
    for drafter, budget in drafts(text[0].tolist()).values():
        assert torch.equal(decode(model, drafter, budget, stable=True).sequences, text)


def test_each_text_of_a_batch_is_what_it_is_alone() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    prompts = torch.tensor([[0, 0, 7, 3, 44, 12, 9], [1, 30, 21, 5, 60, 2, 8]])
    mask = (prompts > 0).long()
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "stable": True}
    both = infer.generate(model, prompts, attention_mask=mask, **settings)
    for row in range(2):
        alone = infer.generate(model, prompts[row : row + 1, 2 * (row == 0) :], **settings)
        assert alone.sequences[0, -12:].tolist() == both.sequences[row, -12:].tolist()


def test_every_pass_after_the_prefill_has_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    real = Target.forward

    def forward(self: Target, ids: torch.Tensor, **kwargs: Any) -> Any:
        widths.append(ids.shape[1])
        return real(self, ids, **kwargs)

    model = tiny_model("llama")
    decode(model, stable=True)  # checks the model with passes of its own
    monkeypatch.setattr(Target, "forward", forward)
    text = decode(model, stable=5).sequences[0].tolist()
    assert widths == [9, *[5] * (NEW - 1)]
    widths.clear()
    long = decode(model, Oracle(text), Budget.chain(12), stable=5)
    assert set(widths[1:]) == {5}
    assert max(done.proposed for done in long.stats.log) == 4, "a draft is shortened to the rows there are"


def test_rows_by_name_and_by_number() -> None:
    assert fixed_rows(True) == 8 and fixed_rows(16) == 16
    assert fixed_rows(False) is None and fixed_rows(None) is None
    for wrong in (0, -1, 2.5, "yes"):
        with pytest.raises(ValueError, match="number of rows of every pass"):
            fixed_rows(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="number of rows"):
        decode(tiny_model("llama"), stable=-3)


@pytest.mark.parametrize("family", DIRECT)
def test_attention_that_cannot_be_exchanged_is_refused_by_name(family: str) -> None:
    model = tiny_model(family)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=r"FalconForCausalLM.*AttentionInterface"):
        decode(model, stable=True)
    assert model.config._attn_implementation == before


def test_attention_that_does_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(*args: Any, softcap: float | None = None, **kwargs: Any) -> Any:
        return attention(*args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, STABLE_ATTENTION, forgetful)
    with pytest.raises(ValueError, match="Gemma2ForCausalLM: its attention does more"):
        decode(tiny_model("gemma2", attn_logit_softcapping=0.5), stable=True)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_models_attention_comes_back(implementation: str) -> None:
    model = tiny_model("llama", attention=implementation)
    target = Target(model)
    first, second = stable_passes(target), stable_passes(target)
    with first, second:
        assert model.config._attn_implementation == STABLE_ATTENTION
    assert model.config._attn_implementation == implementation
    with pytest.raises(RuntimeError, match="stop"), stable_passes(target):
        raise RuntimeError("stop")
    assert model.config._attn_implementation == implementation

    class Tokens:
        all_special_ids: tuple[int, ...] = ()

        def decode(self, ids: Any, **_: Any) -> str:
            return "".join(chr(97 + int(i)) for i in ids)

        def convert_ids_to_tokens(self, token: int) -> str:
            return chr(97 + token)

    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "stable": True, "tokenizer": Tokens()}
    one, two = infer.stream(target, PROMPT, **settings), infer.stream(target, PROMPT, **settings)
    mixed = [piece for pair in zip(one, two, strict=True) for piece in pair]
    assert mixed[::2] == mixed[1::2]
    assert model.config._attn_implementation == implementation
    broken = infer.stream(target, PROMPT, **settings)
    next(broken)
    assert model.config._attn_implementation == implementation, "between passes too"


def test_attention_is_the_usual_one_in_float64() -> None:
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, 5, 8, generator=draw, dtype=torch.float64)
    key, value = (torch.randn(2, 2, 9, 8, generator=draw, dtype=torch.float64) for _ in range(2))
    kept = query.clone()
    bias = torch.randn(1, 6, 5, 9, generator=draw, dtype=torch.float64)
    causal = torch.ones(5, 9, dtype=torch.bool).tril(4)
    layer = torch.nn.Identity()
    many: dict[str, Any] = {"key": key.repeat_interleave(3, 1), "value": value.repeat_interleave(3, 1)}
    sdpa: Any = torch.nn.functional.scaled_dot_product_attention
    both = bias.masked_fill(~causal, float("-inf"))
    cases = {
        "causal": ({"attention_mask": None}, causal),
        "all": ({"attention_mask": None, "is_causal": False}, None),
        "bool": ({"attention_mask": causal[None, None]}, causal),
        "additive": ({"attention_mask": both}, both),
        "bias": ({"attention_mask": causal[None, None], "position_bias": bias}, both),
    }
    for name, (given, mask) in cases.items():
        ours, _ = attention(layer, query, key, value, scaling=0.3, **given)  # type: ignore[arg-type]
        theirs = sdpa(query, attn_mask=mask, scale=0.3, **many).transpose(1, 2)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, msg=name)
    assert torch.equal(query, kept), "the query belongs to the model"

    sinks, none = torch.randn(6, generator=draw, dtype=torch.float64), torch.zeros(2, 6, 1, 8, dtype=torch.float64)
    ours, _ = attention(layer, query, key, value, causal[None, None], scaling=0.3, s_aux=sinks)
    wider = torch.cat(
        [torch.zeros(1, 6, 5, 9).masked_fill(~causal, float("-inf")), sinks.view(1, 6, 1, 1).expand(1, 6, 5, 1)], -1
    )
    theirs = sdpa(query, *(torch.cat([each, none], 2) for each in many.values()), attn_mask=wider, scale=0.3)
    torch.testing.assert_close(ours, theirs.transpose(1, 2), rtol=1e-12, atol=1e-12)


@pytest.mark.real
def test_the_real_targets_text_does_not_depend_on_the_draft() -> None:
    target = real_target(torch.bfloat16)
    chat = [{"role": "user", "content": "Name three colours and say where each is found."}]
    settings: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "output_logits": True, "stable": True}
    plain = infer.generate(target, chat, "none", **settings)
    prompt, text = plain.sequences[:, : -plain.stats.tokens], plain.sequences[0].tolist()
    for drafter, budget in drafts(text, vocab=target.vocab_size).values():
        assert same(infer.generate(target, prompt, drafter, budget=budget, **settings), plain)
