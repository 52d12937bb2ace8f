"""Weights spread over the processes, by DeepSpeed's ZeRO-3 or by FSDP2: telling them, putting them together.

Whatever puts weights together is done by all processes at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from heads.identity import Hash
from heads.target import Target


def is_spread(weight: Tensor) -> bool:
    """Whether a process holds only a part of a weight."""
    return isinstance(weight, DTensor) or hasattr(weight, "ds_id")


def spread_target(target: Target) -> bool:
    """Whether passes of the target take all processes."""
    return any(map(is_spread, target.model.parameters()))


def whole(weight: Tensor) -> Tensor:
    """All of a weight, detached; a copy where it was spread."""
    if isinstance(weight, DTensor):
        full: Tensor = weight.full_tensor()
        return full.detach()
    if not hasattr(weight, "ds_id"):
        return weight.detach()
    with gathered([weight]):
        return weight.detach().clone()


@contextmanager
def gathered(weights: Iterable[Tensor]) -> Iterator[None]:
    """Context in which weights that ZeRO-3 has spread are whole in every process; others are left as they are."""
    spread = [weight for weight in weights if hasattr(weight, "ds_id")]
    if not spread:
        yield
        return
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters(spread):
        yield


def weights_hash(target: Target, main: bool) -> str:
    """:meth:`heads.target.Target.weights_hash` of a target that may be spread, a weight at a time.

    Processes that are not the ``main`` one only help, and get an empty text where there is nothing to help with.
    """
    if not spread_target(target):
        return target.weights_hash() if main else ""
    digest = Hash()
    for name, tensor in sorted(target.model.state_dict(keep_vars=True).items()):
        digest.add(name, whole(tensor))
    return digest.hex()


def spread_by_zero(target: Target) -> None:
    """Of a target whose weights were all spread while it was loaded, keep only the layers' so.

    Embedding, final norm and output matrix are put together again, for heads read their rows; a layer's weights are
    put together for the time of its pass.
    """
    inside = {id(weight) for weight in target.layers.parameters()}
    kept: dict[int, nn.Parameter] = {}
    for module in target.model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if id(weight) not in inside and hasattr(weight, "ds_id"):
                if id(weight) not in kept:  # an output matrix that is the embedding stays so
                    kept[id(weight)] = nn.Parameter(whole(weight), requires_grad=False)
                module.register_parameter(name, kept[id(weight)])
    for layer in target.layers:
        _gather_for_passes(layer)


def _gather_for_passes(layer: nn.Module) -> None:
    weights: list[Any] = list(layer.parameters())

    def before(*_: Any) -> None:
        weights[0].all_gather(param_list=weights)

    def after(*_: Any) -> None:
        weights[0].partition(param_list=weights, has_been_updated=False)

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after, always_call=True)


def spread_by_fsdp(target: Target, processes: int) -> None:
    """Spread each layer's weights over the processes; embedding, final norm and output matrix stay whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(target.device.type, (processes,))
    for layer in target.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)


def check_dtype(dtype: torch.dtype) -> None:
    """ZeRO-3 knows few.

    Raises:
        ValueError: not this one.
    """
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(
            f"DeepSpeed cannot shard a target in {str(dtype).removeprefix('torch.')}: set target.dtype to bfloat16, "
            "float16 or float32, or target.placement to outside"
        )
