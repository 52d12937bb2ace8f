"""Prompts of 1,500 tokens: the text is the target's up to its last position, drafts are accepted as behind a short one.

A target whose layers see a few positions goes on behind 1,500 tokens as it does behind the last of them. Heads that
learned that text, and see as little, must draft it in either place, round by round the same.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import heads.layer as layer_module
import infer
from heads.base import DraftHeads
from heads.grow import Budget
from heads.target import Target
from infer.generation import Generation
from tests.heads.small import memorized, random_ids, small_heads
from tests.tiny import tiny_model

LONG, TAIL, NEW = 1500, 24, 24
CASES: dict[str, dict[str, Any]] = {
    "eagle": {"kind": "eagle", "window": 6},
    "eagle1": {"kind": "eagle1", "window": 6},
    "hydra": {"kind": "hydra", "window": 6},
    "block": {"kind": "block", "window": 6, "anchors": 1.0},
    "medusa": {"kind": "medusa"},
    "mtp": {"kind": "mtp", "anchors": 1.0},
}
BUDGETS = {"chain": Budget.chain(3), "tree": Budget(16, 3, 3)}


@cache
def narrow() -> Target:
    """Four layers that see four positions each."""
    return Target(tiny_model("mistral", sliding_window=4, max_position_embeddings=2048), name="tiny/narrow")


def prompts() -> tuple[Tensor, Tensor]:
    """A short prompt, and one of 1,500 tokens that ends like it."""
    long = random_ids(LONG, seed=4)
    return long[:, -TAIL:], long


@cache
def known(case: str) -> tuple[DraftHeads, list[int]]:
    """Heads that learned what the target says behind the short prompt, and what that is."""
    near, _ = prompts()
    text = narrow().model.generate(near, max_new_tokens=NEW, do_sample=False)[0].tolist()
    return memorized(CASES[case], narrow(), text, steps=30 if case == "mtp" else 50), text[TAIL:]


def decoded(case: str, ids: Tensor, budget: Budget) -> Generation:
    made, _ = known(case)
    return infer.generate(narrow().model, ids, made, budget=budget, max_new_tokens=NEW, do_sample=False)


def rounds(out: Generation) -> list[tuple[int, int, int]]:
    return [(r.proposed, r.accepted, r.emitted) for r in out.stats.log]


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("case", CASES)
def test_acceptance_does_not_fall_with_length(case: str, budget: str) -> None:
    near, far = (decoded(case, ids, BUDGETS[budget]) for ids in prompts())
    assert far.sequences[0, LONG:].tolist() == near.sequences[0, TAIL:].tolist() == known(case)[1]
    assert rounds(far) == rounds(near)
    assert far.stats.tokens_per_round > (1.3 if case == "mtp" else 2.5)


@pytest.mark.parametrize("case", ["eagle", "eagle1", "block"])
def test_positions_that_stop_at_the_trained_length_would_show(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = layer_module.rotary
    stopped = lambda positions, *rest: real(positions.clamp(max=TAIL + NEW), *rest)  # noqa: E731
    for module in ("heads.layer", "heads.block"):
        monkeypatch.setattr(f"{module}.rotary", stopped)
    near, far = (decoded(case, ids, BUDGETS["chain"]) for ids in prompts())
    assert far.sequences[0, LONG:].tolist() == near.sequences[0, TAIL:].tolist(), (
        "the text is the target's all the same"
    )
    assert rounds(far) != rounds(near)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("case", CASES)
def test_the_text_is_the_targets_up_to_its_last_position(case: str, family: str) -> None:
    """Random heads, with a window and without, none of which ever saw a text so long."""
    model = tiny_model(family, layers=2, max_position_embeddings=LONG + NEW)
    far = prompts()[1]
    text = model.generate(far, max_new_tokens=NEW, do_sample=False)
    for window in [{}, {"window": 0}] if "window" in CASES[case] else [{}]:
        options: dict[str, Any] = {"taps": (1, 2)} if case in ("eagle", "block") else {}
        made = small_heads(**{"target": Target(model), **CASES[case], **window, **options})
        for budget in BUDGETS.values():
            out = infer.generate(model, far, made, budget=budget, max_new_tokens=NEW, do_sample=False)
            assert torch.equal(out.sequences, text) and out.stats.proposed > 10
