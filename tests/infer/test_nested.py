"""A text model inside a larger one (``language_model`` of one that also reads pictures) is a target like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import infer
from heads import DraftHeads
from heads.grow import Budget
from heads.target import Target
from tests.heads.small import STORED, memorized, random_ids
from tests.heads.test_target_files import alone, nested

IDS = random_ids(7, seed=3)
GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}


@pytest.fixture(scope="module")
def whole() -> Any:
    """The larger model, in float64."""
    return nested(alone(tied=False), tied=False).double()


@pytest.mark.parametrize("case", ["medusa", "eagle", "block"])
def test_text_with_heads_is_the_larger_models_own(case: str, whole: Any, tmp_path: Path) -> None:
    target = Target(whole, name="tiny/nested")
    text = whole.generate(input_ids=IDS, **GREEDY)
    options = {name: value for name, value in STORED[case].items() if name not in ("draft_vocab", "confidence")}
    heads = memorized(options, target, text[0].tolist(), steps=60)
    for budget in (Budget.chain(3), Budget(rows=9, depth=3, width=3)):
        out = infer.generate(whole, IDS, heads, budget=budget, **GREEDY)
        assert torch.equal(out.sequences, text)
        assert out.stats.accepted > 0, "the heads do read its states"
    heads.save_pretrained(tmp_path)
    found = DraftHeads.from_pretrained(tmp_path, whole)
    assert torch.equal(infer.generate(whole, IDS, found, **GREEDY).sequences, text)


def test_a_draft_from_its_own_layers(whole: Any) -> None:
    text = whole.generate(input_ids=IDS, **GREEDY)
    for draft in ("layers:0-2", "lookup:1"):
        assert torch.equal(infer.generate(whole, IDS, draft, **GREEDY).sequences, text), draft
