"""The modules' clock: outermost calls, in the block only, and nothing left behind."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module

from infer.drafters.timed import ModuleClock


class Slow(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return x if self.inner is None else self.inner(x)


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("no")


def test_nested_modules_count_once() -> None:
    clock, x = ModuleClock(), torch.zeros(1)
    nested = Slow(Slow())
    nested(x)
    assert clock.seconds == 0
    with clock.running():
        started = time.perf_counter()
        nested(x)
        whole = time.perf_counter() - started
        time.sleep(0.05)  # outside of modules
    assert 0.04 <= clock.seconds <= whole
    nested(x)
    assert clock.seconds <= whole


def test_nothing_stays_registered_when_a_module_raises() -> None:
    clock, x = ModuleClock(), torch.zeros(1)
    before = len(module._global_forward_hooks), len(module._global_forward_pre_hooks)
    with pytest.raises(RuntimeError, match="no"), clock.running():
        Failing()(x)
    assert (len(module._global_forward_hooks), len(module._global_forward_pre_hooks)) == before
    with clock.running():
        Slow()(x)
    assert 0.02 <= clock.seconds < 5
