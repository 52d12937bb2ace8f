"""Whether a target is still the very model it was: what its weights and switches say, cheaply, at each call.

Key/value states outlive a call in a prefix cache, and a model may be trained, cast, moved, or have an adapter
switched between two calls. A full hash would cost more than the prefill that the cache saves, so a few values of
every parameter are compared, with torch's own count of in-place changes.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from heads.target import Target

SAMPLES = 8  # values read of each parameter


@torch.no_grad()
def fingerprint(target: Target) -> Hashable:
    """Equal as long as the target computes the same states in the same way.

    An assignment through ``parameter.data`` that spares every sampled value is the one change not seen.
    """
    model: nn.Module = target.model
    facts: list[Hashable] = [getattr(target.config, "_attn_implementation", None)]
    samples: dict[torch.device, list[Tensor]] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        changes = None if tensor.is_inference() else tensor._version
        facts.append((tuple(tensor.shape), tensor.dtype, str(tensor.device), changes))
        if type(tensor) in (Tensor, nn.Parameter) and tensor.device.type != "meta" and tensor.numel():
            step = max(1, tensor.numel() // SAMPLES)
            values = tensor.detach().reshape(-1)[::step][:SAMPLES]
            samples.setdefault(tensor.device, []).append(values.to(torch.float64))
        else:  # a quantizer's own kind of tensor
            facts.append(id(tensor))
    values_read = tuple(torch.cat(each).cpu().numpy().tobytes() for each in samples.values())
    return (*facts, values_read, *_adapters(model))


def _adapters(model: nn.Module) -> list[Hashable]:
    """Which adapters of PEFT are on, and how strongly."""
    return [_switches(part) for part in model.modules() if hasattr(part, "_active_adapter")]


def _switches(part: Any) -> Hashable:
    active = part._active_adapter
    return (
        (active,) if isinstance(active, str) else tuple(active),
        bool(getattr(part, "_disable_adapters", False)),
        tuple(getattr(part, "merged_adapters", ())),
        tuple(sorted(getattr(part, "scaling", {}).items())),
    )
