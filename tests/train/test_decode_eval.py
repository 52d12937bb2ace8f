"""Real decoding at evaluations: what it counts, and when it warns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from heads import build, make_config
from heads.target import Target
from infer.metrics import Round
from tests.heads.small import batch_of
from tests.train.world import conversations, tiny_target
from train.config import EvalConfig
from train.decode_eval import Decoded, _summed, decode_prompts, decoding_copy, disagreement
from train.evaluation import evaluated, spread
from train.figures import Figures, Sums
from train.losses import make_criterion
from train.ranks import Ranks


def made(lookahead: int = 3) -> Any:
    target = tiny_target(torch.float32)
    heads = build(make_config("medusa", target, lookahead=lookahead), target)
    heads.initialize()
    return heads


def figures(*acceptance: float) -> Figures:
    return Figures(loss=1.0, rows=100, terms={}, acceptance=list(acceptance), overlap=list(acceptance))


def decoded(tokens_per_round: float, rounds: int = 200, depth: int = 3, deviation: float = 0.8) -> Decoded:
    return Decoded(4, rounds, tokens_per_round, tokens_per_round, [0.0] * depth, deviation)


def test_counts_follow_the_convention_of_the_case_book() -> None:
    """Four rounds, K = 3, accepted 3, 1, 0, 2: 2.5 tokens a round, by position .75, .5, .25."""
    log = [Round(proposed=3, depth=3, accepted=a, emitted=a + 1) for a in (3, 1, 0, 2)]
    found = _summed(log, log[:2], 2, 3, Ranks())
    assert (found.rounds, found.tokens_per_round, found.acceptance) == (4, 2.5, [0.75, 0.5, 0.25])
    assert found.loop_free == 3.0


def test_prompts_are_really_decoded_and_heads_left_as_they_were() -> None:
    heads = made()
    heads.train()
    before = {name: value.clone() for name, value in heads.state_dict().items()}
    found = decode_prompts(heads, [torch.tensor([1, 2, 3]), torch.tensor([4, 5])], Ranks(), tokens=10)
    assert found.prompts == 2
    assert found.rounds * found.tokens_per_round == pytest.approx(18)  # the prefill's token of each is not a round's
    assert len(found.acceptance) == 3
    assert heads.training and all(torch.equal(value, before[name]) for name, value in heads.state_dict().items())


def test_the_copy_drafts_in_the_targets_dtype_on_the_same_target() -> None:
    heads = made().double()
    copy = decoding_copy(heads)
    assert copy.target is heads.target
    assert {p.dtype for p in copy.parameters()} == {torch.float32}
    assert next(heads.parameters()).dtype == torch.float64


def test_a_stop_ends_it_between_prompts() -> None:
    asked = iter([False, True])
    found = decode_prompts(made(), [torch.tensor([1, 2])] * 5, Ranks(), tokens=4, stop=lambda: next(asked))
    assert found.prompts == 1


def test_random_heads_decode_as_training_says() -> None:
    assert disagreement(figures(0.01, 0.0, 0.0), decoded(1.0, deviation=0.1)) is None
    assert disagreement(figures(0.42, 0.19, 0.10), decoded(1.74)) is None
    assert disagreement(figures(0.42, 0.19, 0.10), decoded(0.0, rounds=0)) is None


def test_an_acceptance_that_decoding_does_not_show_is_warned_of() -> None:
    """Training says 70%, decoding accepts nothing."""
    warning = disagreement(figures(0.7, 0.49, 0.343), decoded(1.02, deviation=0.1))
    assert warning is not None and "promises 2.53 tokens per round, but decoding gives 1.02" in warning
    # oracle heads that training thinks random
    assert disagreement(figures(0.02, 0.0, 0.0), decoded(4.0, deviation=0.0)) is not None


def test_what_training_says_is_what_decoding_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """On texts of the target's own: heads that know nothing get 1 token a round, heads that know them by heart 4; and
    were a tap read one place off while decoding, a warning would say so."""
    target, tokens = tiny_target(), 1 + 3 * 4
    prompts = [torch.tensor([1, 2, 3]), torch.tensor([9, 8])]
    options = {"max_new_tokens": tokens, "do_sample": False}
    texts = [target.model.generate(prompt[None], **options)[0] for prompt in prompts]
    config = make_config("medusa", target, lookahead=3, options={"layers": 2, "own_output": True})
    heads = build(config, target).double()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in heads.parameters():
            weight.copy_(torch.randn(weight.shape, generator=random, dtype=torch.float64) / 6)

    def said() -> Figures:
        """As held-out conversations are judged."""
        sums = Sums()
        for prompt, text in zip(prompts, texts, strict=True):
            mask = torch.arange(len(text))[None] > len(prompt)
            sums.add(heads.loss(batch_of(target, config.taps, text[None], mask), make_criterion({"soft_ce": 1.0})))
        return sums.figures(Ranks())

    def found() -> Decoded:
        return decode_prompts(heads, prompts * 4, Ranks(), tokens=tokens)

    assert said().tokens_per_round < 1.15 and found().tokens_per_round < 1.15
    assert disagreement(said(), found()) is None
    optimizer = torch.optim.Adam(heads.parameters(), lr=1e-2)
    for _ in range(100):
        for text in texts:
            heads.loss(batch_of(target, config.taps, text[None]), make_criterion({"soft_ce": 1.0})).total.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert said().acceptance == [1.0, 1.0, 1.0] and found().tokens_per_round == 4.0
    promised = said()
    assert disagreement(promised, found()) is None
    right = Target.forward
    monkeypatch.setattr(Target, "forward", lambda self, *given, taps=(), **more: right(
        self, *given, taps=[tap - 1 for tap in taps], **more))  # fmt: skip
    warning = disagreement(promised, found())
    assert warning is not None and "promises 4.00 tokens per round" in warning


def test_compared_over_the_depth_that_was_decoded() -> None:
    assert disagreement(figures(0.7, 0.5, 0.4, 0.4, 0.4), decoded(2.2, depth=2)) is None


def test_spread() -> None:
    assert spread(5, 9) == [0, 1, 2, 3, 4]
    assert spread(101, 3) == [0, 50, 100]


def test_only_what_evaluations_look_at_is_kept() -> None:
    of_all = conversations([4, 5, 6, 7, 8])
    assert evaluated(of_all, EvalConfig(conversations=2, prompts=3)).lengths.tolist() == [4, 6, 8]
    assert evaluated(of_all, EvalConfig(conversations=9, prompts=0)) is of_all
