"""What a call gives back besides text: tensors a user can go on with, and times that add up."""

from __future__ import annotations

from typing import Any

import infer
from tests.infer.test_generate import PROMPT, medusa, model

__all__ = ["model"]  # the fixture


def test_outputs_are_ordinary_tensors(model: Any) -> None:
    out = infer.generate(model, PROMPT, max_new_tokens=3, output_scores=True, output_logits=True)
    assert out.scores is not None and out.logits is not None
    assert not any(t.is_inference() for t in (out.sequences, *out.scores, *out.logits))


def test_times_are_counted_inside_each_other(model: Any) -> None:
    out = infer.generate(model, PROMPT, medusa(model), max_new_tokens=12)
    for r in out.stats.log:
        assert (r.draft_seconds > 0) == (r.proposed > 0)
        assert r.draft_seconds <= r.draft_total_seconds
        assert r.target_seconds + r.draft_total_seconds <= r.seconds
    assert 0 < out.stats.forward_share < 1
    assert out.stats.prefill_seconds > 0
