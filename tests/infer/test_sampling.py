"""Sampling through the real sampler and a real model: goodness of fit, seeds, filters, limits of temperature."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import infer
from heads.draft import Draft
from heads.grow import Sampler
from infer import verify
from tests.infer.fakes import FakeDrafter, OneNumber, Sampled, zero_only_drafted
from tests.tiny import tiny_model

P, Q = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.4, 0.3, 0.2, 0.1])


def fits(observed: Sequence[int], expected: Sequence[float]) -> bool:
    """Chi-square with bins under 5 merged; far from flaking: df + 10·√(2·df)."""
    bins: list[tuple[float, float]] = []
    small = [0.0, 0.0]
    for o, e in zip(observed, expected, strict=True):
        if e < 5:
            small = [small[0] + o, small[1] + e]
        else:
            bins.append((o, e))
    if small[1] > 0:
        bins.append((small[0], max(small[1], 1e-9)))
    df = max(len(bins) - 1, 1)
    return sum((o - e) ** 2 / e for o, e in bins) <= df + 10 * math.sqrt(2 * df)


class Fixed:
    """p at every node."""

    foresight = True

    def p(self, node: int) -> Tensor:
        return P

    peek = p

    def best(self, node: int) -> int:
        return int(P.argmax())

    def settle(self, path: Sequence[int]) -> None:
        pass


def draw(count: int, sampler: Any, chooser: verify.Chooser) -> tuple[list[int], float]:
    """First tokens of ``count`` rounds of one drafted token, and the share of rejections."""
    counts, rejected = [0] * 4, 0
    for _ in range(count):
        token, q = sampler(Q.log())
        path, last = verify.token(Draft.chain([token], [q]), Fixed(), chooser)
        counts[token if path else last] += 1
        rejected += not path
    return counts, rejected / count


def test_one_token_against_an_opposing_draft() -> None:
    generator = torch.Generator().manual_seed(1)
    n = 20_000  # through torch's own numbers; test_rules_draws has the many draws
    counts, rejected = draw(n, Sampler(generator=generator), verify.RandomChooser(generator))
    assert rejected >= 0.3
    assert fits(counts, (P * n).tolist())
    assert sum(abs(c / n - p) for c, p in zip(counts, P.tolist(), strict=True)) / 2 < 0.015


class Reusing(OneNumber):
    """Draws each draft with a fresh number, then accepts and falls back with that same number."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__(0.0)
        self.generator = generator

    def __call__(self, logits: Tensor) -> tuple[int, Tensor]:
        self.u = float(torch.rand((), generator=self.generator, dtype=torch.float64))
        return self.sample(logits.softmax(-1)), logits.softmax(-1)


@pytest.mark.parametrize("bug", ["residual from p", "residual without the token", "same numbers"])
def test_the_fit_sees_planted_bugs(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n = 20_000
    generator = torch.Generator().manual_seed(2)
    sampler: Any = Sampler(generator=generator)
    chooser: verify.Chooser = verify.RandomChooser(generator)
    if bug == "residual from p":
        monkeypatch.setattr(verify, "residual", lambda p, q: (p, 1.0))
    elif bug == "residual without the token":
        zero_only_drafted(monkeypatch)
    else:
        sampler = chooser = Reusing(generator)
    counts, _ = draw(n, sampler, chooser)
    assert not fits(counts, (P * n).tolist())


def exact_law(
    model: torch.nn.Module, ids: Tensor, length: int, vocab: int, **warp: float
) -> dict[tuple[int, ...], float]:
    """Law of the continuation by the model's own passes, temperature applied."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        grown: dict[tuple[int, ...], float] = {}
        for text, weight in law.items():
            logits = model(torch.cat([ids, torch.tensor([text], dtype=torch.long)], 1)).logits[0, -1]
            p = (logits.float() / warp.get("temperature", 1.0)).softmax(-1)
            grown |= {(*text, token): weight * float(p[token]) for token in range(vocab)}
        law = grown
    return law


def test_decoding_a_model_against_an_opposing_draft() -> None:
    vocab, n = 5, 2000
    model = tiny_model("llama", vocab=vocab, layers=1)
    ids = torch.tensor([[1, 2, 3]])
    generator = torch.Generator().manual_seed(3)

    def opposing(prefix: tuple[int, ...]) -> Tensor:
        return (-model(torch.tensor([prefix])).logits[0, -1].float() / 1.5).softmax(-1)

    chooser = verify.RandomChooser(generator)
    drafter = Sampled(opposing, chooser)
    with torch.no_grad():
        law = exact_law(model, ids, 3, vocab, temperature=1.5)
        found: Counter[tuple[int, ...]] = Counter()
        rejected = rounds = 0
        for seed in range(n):
            out = infer.generate(
                model, ids, drafter, max_new_tokens=3, do_sample=True, temperature=1.5, top_k=0, seed=seed
            )
            found[tuple(out.sequences[0, 3:].tolist())] += 1
            rejected += sum(r.accepted < min(r.depth, r.emitted) for r in out.stats.log if r.depth)
            rounds += sum(r.depth > 0 for r in out.stats.log)
    assert rejected / rounds >= 0.3
    texts = list(law)
    assert fits([found[text] for text in texts], [n * law[text] for text in texts])
    for at in range(1, 3):  # each position, given what was accepted before it
        for first in range(vocab):
            given = [text for text in texts if text[at - 1] == first]
            total = sum(found[text] for text in given)
            mass = sum(law[text] for text in given)
            observed, expected = [0.0] * vocab, [0.0] * vocab
            for text in given:
                observed[text[at]] += found[text]
                expected[text[at]] += total * law[text] / mass
            if total >= 25:
                assert fits(observed, expected)  # type: ignore[arg-type]


class Likely(FakeDrafter):
    """Draws chains with the sampler it is given, from logits that are the opposite of a fixed favourite's."""

    def draft(self, budget, sampler):  # type: ignore[no-untyped-def]
        logits = torch.linspace(0, 3, 64)
        if sampler is None:
            return Draft.chain([int(logits.argmax())] * budget.depth)
        drawn = [sampler(logits) for _ in range(budget.depth)]
        return Draft.chain([token for token, _ in drawn], [q for _, q in drawn])


def test_a_seed_fixes_the_tokens() -> None:
    model = tiny_model("llama")
    ids = torch.tensor([[1, 2, 3]])
    settings: dict[str, Any] = {"max_new_tokens": 30, "do_sample": True, "temperature": 1.3}
    before = torch.get_rng_state()
    one, two, other = (infer.generate(model, ids, Likely(), seed=seed, **settings).sequences for seed in (7, 7, 8))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(before, torch.get_rng_state()), "a seeded call leaves torch's own generator alone"
    torch.manual_seed(5)
    three = infer.generate(model, ids, Likely(), **settings).sequences
    torch.manual_seed(5)
    assert torch.equal(three, infer.generate(model, ids, Likely(), **settings).sequences)


@pytest.mark.parametrize("limit", [{"temperature": 1e-6}, {"top_k": 1}, {"top_p": 1e-6}])
def test_sampling_turns_greedy_in_the_limit(limit: dict[str, Any]) -> None:
    model = tiny_model("llama")
    ids = torch.tensor([[1, 2, 3]])
    greedy = model.generate(ids, max_new_tokens=30, do_sample=False)
    for drafter in (Likely(), "none"):
        out = infer.generate(model, ids, drafter, max_new_tokens=30, do_sample=True, seed=0, **limit)
        assert torch.equal(out.sequences, greedy)


@pytest.mark.parametrize(
    "filters",
    [
        {"sequence_bias": {(11,): -100.0}},
        {"bad_words_ids": [[11]]},
        {"suppress_tokens": [11]},
        {"min_p": 0.2},
        {"top_p": 0.3},
        {"top_k": 3},
        {"typical_p": 0.4},
        {"epsilon_cutoff": 0.05},
    ],
)
def test_filters_hold_at_every_position(filters: dict[str, Any]) -> None:
    """Nothing the filters exclude is ever emitted, drafted or not; every token lies in the baseline's support."""
    model = tiny_model("llama")
    with torch.no_grad():  # make 11 the top token wherever it is allowed
        model.lm_head.weight[11] = model.lm_head.weight[11] * 0.1
    drafter = Likely()
    for seed in range(4):
        out = infer.generate(
            model,
            torch.tensor([[1, 2, 3]]),
            drafter,
            max_new_tokens=50,
            do_sample=True,
            temperature=2.0,
            seed=seed,
            output_scores=True,
            **filters,
        )
        new = out.sequences[0, 3:].tolist()
        assert out.scores is not None and len(out.scores) == len(new)
        assert all(math.isfinite(float(scores[0, token])) for scores, token in zip(out.scores, new, strict=True))
        if {"sequence_bias", "bad_words_ids", "suppress_tokens"} & filters.keys():
            assert 11 not in new


def test_output_scores_are_those_of_generate() -> None:
    """The same text fed to generate gives the same processed scores at every position."""
    model = tiny_model("llama")
    ids = torch.tensor([[1, 2, 3]])
    settings: dict[str, Any] = {
        "max_new_tokens": 20,
        "output_scores": True,
        "output_logits": True,
        "repetition_penalty": 1.2,
    }
    theirs = model.generate(ids, do_sample=False, return_dict_in_generate=True, **settings)
    ours = infer.generate(model, ids, Likely(), do_sample=False, **settings)
    assert torch.equal(ours.sequences, theirs.sequences)
    for a, b in ((ours.scores, theirs.scores), (ours.logits, theirs.logits)):
        assert a is not None and len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert x.dtype == y.dtype
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
