"""Decoding with a prefix cache: the same tokens and logits as without, and only what is new is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import infer
from heads.grow import Budget
from heads.target import Target
from infer.decode import Decoding
from infer.drafters import HeadsDrafter, NoDrafter
from infer.first_token import first_token
from infer.prefix import Hit, PrefixCache
from infer.rounds import Rounds
from infer.stopping import Stop
from tests.infer.fakes import RandomTree
from tests.infer.test_greedy import random_heads
from tests.tiny import tiny_model, tiny_seq2seq

BOUND = 1e-10
SYSTEM = [7, 3, 44, 12, 9, 30, 21, 5, 60, 11, 2, 17]
NEW = 14
MODELS: dict[str, Any] = {
    "llama": {},
    "gpt2": {},
    "gemma3": {"layers": 6},  # five sliding layers to one full
    "mistral": {"sliding_window": 8},
}


class Passes:
    """A target that counts the rows of its passes."""

    def __init__(self, model: Any) -> None:
        self.target = Target(model)
        self.rows: list[int] = []
        real = self.target.forward

        def forward(ids: Tensor, **kwargs: Any) -> Any:
            self.rows.append(ids.shape[1])
            return real(ids, **kwargs)

        self.target.forward = forward  # type: ignore[method-assign]


def decode(
    target: Target, prompts: list[list[int]], prefix: PrefixCache | None, drafter: Any = None, new: int = NEW
) -> list[Decoding]:
    """Greedy texts with their logits, decoded together."""
    texts = [
        Decoding(
            target=target,
            ids=torch.tensor([prompt]),
            drafter=(drafter or NoDrafter)(),
            budget=Budget(rows=6, depth=3, width=2),
            stop=Stop(len(prompt) + new),
            keep_scores=True,
        )
        for prompt in prompts
    ]
    for _ in Rounds(texts, prefix=prefix).run():
        pass
    return texts


def new_tokens(text: Decoding) -> list[int]:
    return text.tokens.view()[0].tolist()


def apart(ours: Decoding, theirs: Decoding) -> float:
    """Largest relative difference of any logit; infinite where the tokens differ."""
    if new_tokens(ours) != new_tokens(theirs):
        return float("inf")
    pairs = zip(ours.logits, theirs.logits, strict=True)
    return max(float((a.double() - b.double()).abs().max() / b.double().abs().max()) for a, b in pairs)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["none", "eagle", "tree"])
@torch.inference_mode()
def test_a_chat_goes_on_where_it_was(name: str, kind: str) -> None:
    """Turn by turn: prompt and answer so far are not read again, and nothing else changes."""
    seen = Passes(tiny_model(name, **MODELS[name]))
    target, cache = seen.target, PrefixCache()
    heads = random_heads(target.model, "eagle")
    make = {"none": NoDrafter, "eagle": lambda: HeadsDrafter(heads), "tree": lambda: RandomTree([1] * 99)}[kind]
    text = list(SYSTEM)
    for turn in range(3):
        prompt = [*text, 50 + turn, 1, 2]
        (plain,) = decode(target, [prompt], None, make)
        seen.rows.clear()
        (ours,) = decode(target, [prompt], cache, make)
        # the last token of an answer was never read
        assert seen.rows[0] == (len(prompt) if turn == 0 else 4)
        assert ours.stats.reused == len(prompt) - seen.rows[0]
        assert apart(ours, plain) <= BOUND
        assert [r.accepted for r in ours.stats.log] == [r.accepted for r in plain.stats.log], "the drafter's view too"
        text = new_tokens(ours)
    assert cache.tokens == len(text) - 1


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_rows_of_a_batch_recall_each_its_own(name: str) -> None:
    seen = Passes(tiny_model(name, **MODELS[name]))
    target, cache = seen.target, PrefixCache()
    prompts = [[*SYSTEM, 50, 51, 1], [*SYSTEM, 52, 2], [40, 41], [*SYSTEM[:6], 8]]
    plain = [decode(target, [prompt], None)[0] for prompt in prompts]
    (first,) = decode(target, prompts[:1], cache)
    assert apart(first, plain[0]) <= BOUND
    seen.rows.clear()
    ours = decode(target, prompts, cache)
    assert [text.stats.reused for text in ours] == [len(SYSTEM) + 2, len(SYSTEM), 0, 6]
    assert seen.rows[0] == 2
    assert max(apart(a, b) for a, b in zip(ours, plain, strict=True)) <= BOUND
    again = decode(target, prompts, cache)
    assert [text.stats.reused for text in again] == [len(prompt) - 1 for prompt in prompts]
    assert max(apart(a, b) for a, b in zip(again, plain, strict=True)) <= BOUND


@torch.inference_mode()
def test_up_to_the_last_position() -> None:
    """Rows that read little are padded to those that read much, yet stay within the positions of the target."""
    model = tiny_model("gpt2", n_positions=40)
    target, cache = Target(model), PrefixCache()
    prompts = [[*SYSTEM, *range(20)], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
    plain = [decode(target, [prompt], None, new=8)[0] for prompt in prompts]
    decode(target, prompts[:1], cache, new=8)
    ours = decode(target, prompts, cache, new=8)
    assert max(apart(a, b) for a, b in zip(ours, plain, strict=True)) <= BOUND


@torch.inference_mode()
def test_states_stored_without_taps_do_not_mislead_heads() -> None:
    model = tiny_model("llama")
    target, cache = Target(model), PrefixCache()
    heads = random_heads(model, "eagle")
    prompt = [*SYSTEM, 1]
    decode(target, [prompt], cache)
    (plain,) = decode(target, [prompt], None, lambda: HeadsDrafter(heads))
    (ours,) = decode(target, [prompt], cache, lambda: HeadsDrafter(heads))
    assert ours.stats.reused == 0
    (again,) = decode(target, [prompt], cache, lambda: HeadsDrafter(heads))
    assert again.stats.reused == len(prompt) - 1
    for text in (ours, again):
        assert apart(text, plain) <= BOUND
        assert [r.accepted for r in text.stats.log] == [r.accepted for r in plain.stats.log]


@pytest.mark.parametrize("bug", ["another prompt's state", "one token too many", "values of another layer"])
@torch.inference_mode()
def test_planted_bugs_exceed_the_bound_a_thousandfold(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny_model("llama"))
    cache = PrefixCache()
    decode(target, [[*SYSTEM, 1, 2, 3]], cache)
    other = [*SYSTEM[:4], 33, *SYSTEM[5:], 1, 2, 3]
    (plain,) = decode(target, [other], None)
    real = PrefixCache.lookup

    def lookup(self: PrefixCache, target: Target, ids: list[int], taps: Any, *rest: Any) -> Hit | None:
        if bug == "another prompt's state":
            return real(self, target, [*SYSTEM, 1, 2, 3], taps)
        hit = real(self, target, ids, taps)
        assert hit is not None and hit.length == 4
        if bug == "one token too many":
            more = real(self, target, SYSTEM[:6], taps)
            return more
        k, v = zip(*hit.layers, strict=True)
        return Hit(hit.length, list(zip(k, v[::-1], strict=True)), hit.taps)

    monkeypatch.setattr(PrefixCache, "lookup", lookup)
    (ours,) = decode(target, [other], cache)
    assert apart(ours, plain) > 1000 * BOUND


@pytest.mark.parametrize(
    "passes", [{"cache_implementation": "static"}, {"stable": True}, {"stable": 8, "cache_implementation": "static"}]
)
def test_prefixes_in_caches_and_passes_of_fixed_shape(passes: dict[str, Any]) -> None:
    model, cache = tiny_model("llama"), PrefixCache()
    heads = random_heads(model, "eagle")
    asked: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False} | passes
    ids = torch.tensor([[*SYSTEM, 1, 2], [*SYSTEM, 3, 4]])
    infer.generate(model, ids[:1], heads, prefix_cache=cache, **asked)
    ours = infer.generate(model, ids, heads, prefix_cache=cache, **asked)
    assert [stats.reused for stats in ours.row_stats] == [len(SYSTEM) + 1, len(SYSTEM)]
    assert torch.equal(ours.sequences, infer.generate(model, ids, heads, **asked).sequences)


def test_an_encoder_decoder_is_refused() -> None:
    with pytest.raises(ValueError, match="prefix_cache is not supported"):
        infer.generate(tiny_seq2seq("t5"), torch.tensor([SYSTEM]), prefix_cache=PrefixCache(), max_new_tokens=3)


def test_the_first_token_is_timed_with_and_without() -> None:
    prompts = [torch.tensor([[*SYSTEM, last]]) for last in (1, 2, 3, 4)]
    found = first_token(Target(tiny_model("llama")), prompts)
    assert (found.asked, found.read) == (3 * (len(SYSTEM) + 1), 3)
    assert found.without > 0 and found.recalled > 0 and found.ratio > 0
    with pytest.raises(ValueError, match="from the second prompt on: 1 given"):
        first_token(Target(tiny_model("llama")), prompts[:1])


@torch.inference_mode()
def test_an_interrupted_text_leaves_its_prompt_only() -> None:
    target, cache = Target(tiny_model("llama")), PrefixCache()
    text = Decoding(target, torch.tensor([SYSTEM]), NoDrafter(), Budget(1, 0), Stop(len(SYSTEM) + NEW))
    rounds: Any = Rounds([text], prefix=cache).run()
    for _ in range(3):
        next(rounds)
    rounds.close()
    assert cache.tokens == len(SYSTEM)
    (plain,) = decode(target, [[*SYSTEM, 4]], None)
    (ours,) = decode(target, [[*SYSTEM, 4]], cache)
    assert ours.stats.reused == len(SYSTEM)
    assert apart(ours, plain) <= BOUND
