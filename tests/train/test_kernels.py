"""Kernels that this machine cannot run are refused before anything begins; Liger's go where they are asked for."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from heads import build, make_config
from tests.train.world import tiny_target
from train.config import TrainConfig
from train.kernels import check_kernels, use_in_heads, use_in_target

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("settings", "device", "message"),
    [
        (
            TrainConfig(attention="flex"),
            CPU,
            r"attention is flex, which has no gradient on cpu: set it to plain",
        ),
        (TrainConfig(kernels="liger"), CPU, r"train\.kernels is liger, which needs a GPU, not cpu"),
        (TrainConfig(kernels="liger"), GPU, r"not installed: pip install -e '\.\[liger\]'"),
    ],
)
def test_refused(settings: TrainConfig, device: torch.device, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=message):
        check_kernels(settings, device)


def test_the_plain_ones_are_always_right() -> None:
    check_kernels(TrainConfig(), CPU)
    target = tiny_target()
    use_in_target(TrainConfig(), target)
    heads = build(make_config("medusa", target), target)
    use_in_heads(TrainConfig(), heads)
    with pytest.raises(ValueError, match="flex, but medusa heads know plain"):
        use_in_heads(TrainConfig(attention="flex"), heads)
    eagle = build(make_config("eagle", target, taps=(1, 2, 3)), target)
    use_in_heads(TrainConfig(attention="flex"), eagle)
    assert eagle.attention == "flex"


def test_liger_is_called_as_it_is_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the package: the whole target at once, every norm of the heads, and no other loss."""
    calls: list[Any] = []
    patch = types.ModuleType("monkey_patch")
    patch.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}  # type: ignore[attr-defined]
    patch._apply_liger_kernel_to_instance = lambda **given: calls.append(given)  # type: ignore[attr-defined]

    class Norm:
        @staticmethod
        def apply(x: Any, weight: Any, eps: float, offset: float, casting: str, in_place: bool) -> Any:
            calls.append((offset, casting, in_place))
            return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

    norm = types.ModuleType("rms_norm")
    norm.LigerRMSNormFunction = Norm  # type: ignore[attr-defined]
    transformers = types.ModuleType("transformers")
    transformers.monkey_patch = patch  # type: ignore[attr-defined]
    for name, module in (
        ("liger_kernel", types.ModuleType("liger_kernel")), ("liger_kernel.transformers", transformers),
        ("liger_kernel.transformers.monkey_patch", patch), ("liger_kernel.ops", types.ModuleType("ops")),
        ("liger_kernel.ops.rms_norm", norm),
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    target, settings = tiny_target(), TrainConfig(kernels="liger")
    use_in_target(settings, target)
    assert calls == [{"model": target.model, "cross_entropy": False, "fused_linear_cross_entropy": False}]
    heads: Any = build(make_config("eagle", target, taps=(1, 2, 3)), target).double()
    x = torch.randn(2, 3, 32, dtype=torch.float64)
    before = heads.norm(x)
    use_in_heads(settings, heads)
    assert torch.equal(heads.norm(x), before)
    assert calls[1:] == [(0.0, "llama", False)]
    patch.MODEL_TYPE_TO_APPLY_LIGER_FN = {}  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"Liger has no kernels for tiny \(llama\): set train\.kernels to torch"):
        use_in_target(settings, target)
