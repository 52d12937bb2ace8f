"""The law of text decoded with heads that draft inside the pass: every branch of the real loop on a real model."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from transformers import LogitsProcessorList, SuppressTokensAtBeginLogitsProcessor

from heads.grow import Budget
from heads.mtp import Mtp
from heads.target import Target
from infer import verify
from infer.decode import Decoding
from infer.drafters import HeadsDrafter
from infer.stopping import Stop
from tests.heads.inside import small_mtp
from tests.infer.exact import Drawing
from tests.infer.fakes import Branching, enumerate_law, zero_only_drafted
from tests.tiny import tiny_model

PROMPT, VOCAB = (1, 0), 3
FIRST = (2, 0)  # tokens that are forced: of the prefill, and of the first pass, which has masks and no draft yet
Law = dict[tuple[int, ...], float]


def beginning() -> LogitsProcessorList:
    """Nothing but ``FIRST`` can be said at first."""
    others = [[token for token in range(VOCAB) if token != only] for only in FIRST]
    return LogitsProcessorList(
        SuppressTokensAtBeginLogitsProcessor(each, len(PROMPT) + at) for at, each in enumerate(others)
    )


def tiny(lookahead: int = 2) -> Mtp:
    """Three tokens, one layer; drafts of which about half are rejected."""
    return small_mtp(
        Target(tiny_model("llama", layers=1, vocab=VOCAB, num_attention_heads=2)), lookahead=lookahead, seed=1
    )


def own_law(target: Target, length: int) -> Law:
    """Of ``length`` tokens behind ``FIRST``, sampled from the target one by one."""
    law = {}
    for text in product(range(VOCAB), repeat=length):
        logits = target.forward(torch.tensor([[*PROMPT, *FIRST, *text]])).logits[0, len(PROMPT) + len(FIRST) - 1 :]
        p = logits.float().softmax(-1, dtype=torch.float64)  # as transformers hands scores on
        weight = 1.0
        for at, token in enumerate(text):
            weight *= float(p[at, token])
        law[text] = weight
    return law


def decoded_law(made: Mtp, budget: Budget, length: int, rule: verify.Rule | None, draw: bool) -> tuple[Law, float]:
    """Of the loop's output, and the share of drafting rounds that end in a rejection."""
    rejected = drafted = 0.0

    def run(chooser: Branching) -> tuple[int, ...]:
        nonlocal rejected, drafted
        decoding = Decoding(
            target=made.target,
            ids=torch.tensor([PROMPT]),
            drafter=HeadsDrafter(made),
            budget=budget,
            stop=Stop(len(PROMPT) + len(FIRST) + length),
            processors=beginning(),
            do_sample=True,
            rule=rule,
            chooser=chooser,
            sampler=Drawing(chooser) if draw else None,
        )
        text = tuple(token for tokens in decoding.run() for token in tokens)
        for r in decoding.stats.log:
            drafted += chooser.weight * (r.depth > 0)
            rejected += chooser.weight * (r.accepted < min(r.depth, r.emitted))
        assert text[: len(FIRST)] == FIRST
        return text[len(FIRST) :]

    law = enumerate_law(run)
    return law, rejected / drafted if drafted else 0.0


def distance(made: Mtp, budget: Budget, length: int, rule: verify.Rule | None, draw: bool) -> tuple[float, float]:
    """Largest difference of a probability, and the share of rejections."""
    ours, rejections = decoded_law(made, budget, length, rule, draw)
    theirs = own_law(made.target, length)
    assert sum(ours.values()) == pytest.approx(1.0, abs=1e-12)
    return max(abs(ours.get(text, 0.0) - weight) for text, weight in theirs.items()), rejections


DRAWN = {
    "token, chain of two": (verify.token, Budget(9, 2), 3),
    "block, chain of two": (verify.block, Budget(9, 2), 3),
    "token, tree": (verify.token, Budget(9, 1, 2), 2),
    "traversal, tree": (verify.traversal, Budget(9, 1, 2), 2),
}
CHOSEN = {
    "siblings, chain of two": (verify.siblings, Budget(9, 2), 3),
    "siblings, tree": (verify.siblings, Budget(12, 2, 2), 3),
    "token, chain": (verify.token, Budget(4, 1), 3),
    "traversal, tree": (verify.traversal, Budget(9, 1, 2), 3),
}


@pytest.mark.parametrize("case", DRAWN)
def test_drawn_drafts_keep_the_law(case: str) -> None:
    rule, budget, length = DRAWN[case]
    worst, rejections = distance(tiny(), budget, length, rule, draw=True)
    assert worst <= 1e-12 and rejections >= 0.3


@pytest.mark.parametrize("case", CHOSEN)
def test_chosen_drafts_keep_the_law(case: str) -> None:
    rule, budget, length = CHOSEN[case]
    worst, rejections = distance(tiny(), budget, length, rule, draw=False)
    assert worst <= 1e-12 and rejections >= 0.3


def test_a_wrong_residual_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    zero_only_drafted(monkeypatch)
    assert distance(tiny(), Budget(9, 1, 2), 2, verify.token, draw=True)[0] > 1e-6


def test_verified_rows_that_see_masks_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """As do masks whose keys and values stay behind the pass."""
    from heads.inside import ExtraRows

    visibility = ExtraRows.visibility

    def leaking(self: ExtraRows, draft: object) -> torch.Tensor:
        rows = visibility(self, draft)  # type: ignore[arg-type]
        rows[0, len(rows) - len(self) :] = True
        return rows

    monkeypatch.setattr(ExtraRows, "visibility", leaking)
    monkeypatch.setattr("infer.layout.Layout._seen", lambda self, draft, more: more.visibility(draft))
    assert distance(tiny(), Budget(4, 1), 2, verify.token, draw=True)[0] > 1e-6
