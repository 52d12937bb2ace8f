"""Faster kernels, for GPUs alone: Liger's fused norms, rotary and feed-forward parts, and torch's FlexAttention.

They round otherwise than the plain ones, so states that they compute have a cache of their own.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from heads.base import DraftHeads
from heads.norm import RMSNorm
from heads.target import Target
from train.config import TrainConfig


def check_kernels(settings: TrainConfig, device: torch.device) -> None:
    """Before anything long begins.

    Raises:
        ValueError: kernels were asked for that this machine cannot run; says what to set.
    """
    if settings.attention == "flex" and device.type != "cuda":
        raise ValueError(f"train.attention is flex, which has no gradient on {device.type}: set it to plain")
    if settings.kernels == "liger" and device.type != "cuda":
        raise ValueError(f"train.kernels is liger, which needs a GPU, not {device.type}: set it to torch")
    if settings.kernels == "liger" and importlib.util.find_spec("liger_kernel") is None:
        raise ValueError("train.kernels is liger, which is not installed: pip install -e '.[liger]' in the clone")


def use_in_target(settings: TrainConfig, target: Target) -> None:
    """Put Liger's kernels into a target's modules, where asked for.

    Raises:
        ValueError: Liger has none for this kind of model.
    """
    if settings.kernels != "liger":
        return
    from liger_kernel.transformers import monkey_patch

    kind = getattr(target.config, "model_type", "")
    if kind not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ValueError(f"Liger has no kernels for {target.name} ({kind}): set train.kernels to torch")
    # the loss is this project's own, and what heads read must stay what the model gives
    monkey_patch._apply_liger_kernel_to_instance(
        model=target.model, cross_entropy=False, fused_linear_cross_entropy=False
    )


def use_in_heads(settings: TrainConfig, heads: DraftHeads) -> None:
    """Choose how heads attend in training, and put Liger's norm into them, where asked for.

    Raises:
        ValueError: heads of this kind cannot attend so.
    """
    if settings.attention not in heads.attentions:
        raise ValueError(
            f"train.attention is {settings.attention}, but {heads.config.kind} heads know {', '.join(heads.attentions)}"
        )
    heads.attention = settings.attention
    if settings.kernels != "liger":
        return
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    for module in heads.modules():
        if isinstance(module, RMSNorm):
            module.forward = _liger_norm(module, LigerRMSNormFunction)  # type: ignore[method-assign]


def _liger_norm(module: RMSNorm, function: Any) -> Any:
    def forward(x: Tensor) -> Tensor:
        assert module.weight is not None
        read: Tensor = function.apply(x, module.weight.to(x.dtype), module.eps, 0.0, "llama", False)
        return read

    return forward
