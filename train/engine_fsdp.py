"""FSDP2: weights, gradients and optimizer state of the heads are spread over the processes by ``fully_shard``.

``fully_shard`` is called here and not by accelerate, whose own way needs accelerators: so what runs on GPUs is what the
tests run on CPU processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from train.engine import Engine, MakeOptimizer, by_number
from train.launch import LaunchError


class Fsdp(Engine):
    """Sharded by torch's FSDP2."""

    name = "fsdp2"

    def _prepare(self, make: MakeOptimizer) -> tuple[Any, Any]:
        mesh = init_device_mesh(self.accelerator.device.type, (self.accelerator.num_processes,))
        fully_shard(self.step.inner, mesh=mesh)
        if not isinstance(self.step.inner, FSDPModule):
            raise LaunchError(f"FSDP2 was asked for, but {type(self.step.inner).__name__} would run")
        return self.step, make([weight for weight in self.heads.parameters() if weight.requires_grad])

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """See :class:`train.engine.Engine`."""
        self.accelerator.sync_gradients = last
        inner: Any = self.step.inner
        inner.set_requires_gradient_sync(last)
        yield

    def backward(self, loss: Tensor) -> None:
        """See :class:`train.engine.Engine`."""
        loss.backward()

    def clip(self, limit: float) -> float:
        """See :class:`train.engine.Engine`."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, limit or float("inf"))
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def restore(self, weights: dict[str, Tensor], moments: dict[str, Tensor]) -> None:
        """See :class:`train.engine.Engine`."""
        with torch.no_grad():
            for name, tensor in self.heads.state_dict(keep_vars=True).items():
                tensor.copy_(_like(weights[name], tensor))
        moved = [weight for group in self.optimizer.param_groups for weight in group["params"]]  # as they are numbered
        state = {
            number: {name: _like(value, moved[number]) if value.dim() else value for name, value in s.items()}
            for number, s in by_number(moments).items()
        }
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})


def _like(value: Tensor, model: Tensor) -> Tensor:
    """A whole value, spread as ``model`` is."""
    value = value.to(model.device)
    return distribute_tensor(value, model.device_mesh, model.placements) if isinstance(model, DTensor) else value
