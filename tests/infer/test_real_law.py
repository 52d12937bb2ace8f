"""The law on the embedded target's own 49,152 tokens, at temperature 0.7 and top-p 0.9: two tokens of a round."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from heads.grow import Budget
from infer.law import POSITIONS, Sampling, compare, expected_law, residual_from_target, sample_rounds
from infer.verify import Rule
from tests.infer.test_certify import Opposed
from tests.tiny import real_target


class OpposedOnce(Opposed):
    """Looks at each prefix once, however often it is drafted behind."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[tuple[int, ...], Tensor] = {}

    def logits(self, more: Sequence[int]) -> Tensor:
        key = (*self.text[0].tolist(), *more)
        if key not in self.known:
            self.known[key] = super().logits(more)
        return self.known[key]


@pytest.mark.real
def test_sampled_rounds_follow_the_real_targets_law() -> None:
    target, drafter, sampling = real_target(torch.float32), OpposedOnce(), Sampling(draws=700)
    prompt = torch.tensor([target.tokenizer()("My favourite food is")["input_ids"]])
    rules: dict[str, Rule | None] = {"best": None, "control": residual_from_target}
    passed = {}
    for name, rule in rules.items():
        seen = sample_rounds(target, drafter, prompt, Budget.chain(2), sampling, rule)
        assert seen.rejected >= 0.3 * sampling.draws
        law = expected_law(target, prompt, list(seen.counts), sampling)
        tests = [compare(seen, law, position) for position in POSITIONS]
        assert tests[0].df >= 10 and tests[1].draws >= 100, "many tokens are told apart, and many rounds have two"
        passed[name] = all(test.passed for test in tests)
    assert passed == {"best": True, "control": False}
