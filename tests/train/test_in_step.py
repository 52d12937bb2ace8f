"""Processes that make unequally many passes of a spread target stay in step; simulated, one process at a time.

That real ones do, under ZeRO-3 and FSDP2, is shown in ``test_engines.py``: their prompts end after unequal rounds.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from heads.target import Target
from tests.train.world import tiny_target
from train import in_step
from train.in_step import InStep
from train.ranks import Ranks


class Others(Ranks):
    """Two processes, of which the other one still has so many passes."""

    def __init__(self, passes: int) -> None:
        super().__init__()
        self.count, self.passes = 2, passes
        self.heard: list[float] = []

    def add(self, values: Any) -> list[float]:
        self.heard.append(values[0])
        self.passes -= 1
        return [values[0] + float(self.passes >= 0)]


def counted(target: Target) -> list[int]:
    passes: list[int] = []
    target.model.register_forward_hook(lambda *_: passes.append(1))
    return passes


def test_each_pass_is_announced_and_those_of_others_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_step, "spread_target", lambda target: True)
    target, ranks = tiny_target(), Others(5)
    passes = counted(target)
    with InStep(target, ranks) as steps:
        for _ in range(2):
            target.forward(torch.tensor([[1, 2, 3]]))
        assert ranks.heard == [1.0, 1.0]
        steps.along()
    assert ranks.heard == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]  # three more of the other, and the word that it is done
    assert len(passes) == 5
    target.forward(torch.tensor([[1]]))
    assert len(ranks.heard) == 6  # nothing is announced any more


def test_a_whole_target_needs_no_word() -> None:
    target, ranks = tiny_target(), Others(5)
    passes = counted(target)
    with InStep(target, ranks) as steps:
        target.forward(torch.tensor([[1]]))
        steps.along()
    assert ranks.heard == [] and len(passes) == 1
