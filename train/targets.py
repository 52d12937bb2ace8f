"""Loading the frozen target, and where it stands beside the engine that trains.

=========  ==========================================================================================
outside    whole in every process; the engine does not know it
inside     its layers are part of the module that the engine is given: still whole under DDP, ZeRO-1
           and ZeRO-2; ZeRO-3 spreads them over the processes as it does with all it is given
sharded    its layers are spread while it is loaded, so that no process ever holds it whole (ZeRO-3),
           or at once afterwards (FSDP2)
=========  ==========================================================================================

Embedding, final norm and output matrix are whole in every process always: heads read their rows.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator

from heads import derived
from heads.embedded import resolve
from heads.target import Target
from train.config import RunConfig, TargetConfig
from train.guards import check_target
from train.kernels import check_kernels, use_in_target
from train.ranks import Ranks
from train.spread import check_dtype, gathered, spread_by_fsdp, spread_by_zero


def load_target(config: RunConfig, accelerator: Accelerator) -> Target:
    """The frozen target for this process; nothing in it takes gradients."""
    check_kernels(config.train, accelerator.device)
    target = _load(config, accelerator)
    use_in_target(config.train, target)
    return target


def _load(config: RunConfig, accelerator: Accelerator) -> Target:
    ranks, settings = Ranks(accelerator), config.target
    if ranks.main:
        resolve(settings.name)  # so that the embedded target is converted once, not by every process
    ranks.wait()
    if settings.placement != "sharded":
        return open_target(settings, accelerator.device)
    if accelerator.state.deepspeed_plugin is not None:
        target = _open_spread(settings, accelerator.device)
        with gathered(target.layers[target.num_layers // 2].parameters()):
            target.identity()  # it reads rows of this layer, and is kept
        return target
    target = open_target(settings, accelerator.device)
    target.identity()
    spread_by_fsdp(target, ranks.count)
    return target


def open_target(settings: TargetConfig, device: torch.device) -> Target:
    """The frozen target, whole, on a device."""
    target = derived.load(
        settings.name,
        dtype=getattr(torch, settings.dtype),
        device=device,
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
        adapter=settings.adapter,
        adapter_revision=settings.adapter_revision,
        quantization=None if settings.quantization == "none" else settings.quantization,
    )
    target.model.requires_grad_(False)
    check_target(target, getattr(torch, settings.dtype))
    return target


def _open_spread(settings: TargetConfig, device: torch.device) -> Target:
    """The target, read by DeepSpeed part by part, each process keeping its share."""
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    dtype = getattr(torch, settings.dtype)
    check_dtype(dtype)
    # as long as this lives, transformers creates models spread, in the dtype that is enabled
    asked = HfDeepSpeedConfig(
        {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3},
            "bf16": {"enabled": dtype == torch.bfloat16},
            "fp16": {"enabled": dtype == torch.float16},
        }
    )
    try:
        target = open_target(settings, device)
    finally:
        unset_hf_deepspeed_config()
        del asked
    spread_by_zero(target)
    return target
