"""DeepSpeed's ZeRO: optimizer state (stage 1), gradients too (2) and weights too (3) are spread over the processes.

DeepSpeed reduces and steps inside its own backward pass. Its files are not used: optimizer state is put together
through its interface for that, so that a checkpoint is the same as any other engine's and holds no pickle.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from train.engine import Engine, MakeOptimizer, by_number
from train.launch import LaunchError
from train.optimizer import ADAMW
from train.optimizer import MOMENTS as KEPT
from train.step import HeadsStep, Step

MOMENTS = KEPT[ADAMW]  # one value a weight


class Zero(Engine):
    """ZeRO-1, 2 or 3; and stage 0, which is DeepSpeed's plain data parallelism."""

    takes_early, flattens = True, "DeepSpeed"

    def __init__(self, accelerator: Accelerator, step: Step, make: MakeOptimizer) -> None:
        self.stage = int(accelerator.state.deepspeed_plugin.zero_stage)
        super().__init__(accelerator, step, make)

    @property
    def name(self) -> str:  # type: ignore[override]
        """With the stage."""
        return f"zero-{self.stage}"

    def _prepare(self, make: MakeOptimizer) -> tuple[Any, Any]:
        from deepspeed import DeepSpeedEngine
        from deepspeed.utils import set_z3_leaf_modules

        if self.stage == 3:
            # gathered and reduced as one piece; that its backward pass is over DeepSpeed sees by its inputs' gradient
            set_z3_leaf_modules(self.step, [HeadsStep])
            self.step.watched = True
        model, optimizer = super()._prepare(make)
        if not isinstance(model, DeepSpeedEngine) or model.zero_optimization_stage() != self.stage:
            raise LaunchError(f"DeepSpeed stage {self.stage} was asked for, but {type(model).__name__} would run")
        return model, optimizer

    def clip(self, limit: float) -> float | None:
        """The norm alone: clipping was done in the last backward pass, as DeepSpeed's configuration says."""
        norm = self.model.get_global_grad_norm()
        return None if norm is None else float(norm)

    def update(self) -> None:
        """Done in the last backward pass."""

    @property
    def _parts(self) -> list[Tensor]:
        """The flat float32 tensors that the inner optimizer works on."""
        outer = self.model.optimizer
        return list(outer.fp32_partitioned_groups_flat if self.stage == 3 else outer.single_partition_of_fp32_groups)

    def moments(self) -> dict[str, Tensor]:
        """See :class:`train.engine.Engine`."""
        if not self.stage:
            return super().moments()
        from deepspeed.utils import safe_get_full_optimizer_state

        state = self.model.optimizer.optimizer.state
        steps = [float(state[part]["step"]) for part in self._parts if part in state]
        if not steps:
            return {}
        found = {}
        for number, weight in enumerate(self.parameters):
            found[f"{number}.step"] = torch.tensor(steps[0])
            for name in MOMENTS:
                found[f"{number}.{name}"] = safe_get_full_optimizer_state(weight, name).cpu()
        return found

    def restore(self, weights: dict[str, Tensor], moments: dict[str, Tensor]) -> None:
        """See :class:`train.engine.Engine`."""
        if not self.stage:
            return super().restore(weights, moments)
        state = by_number(moments)
        if state:
            self._begin_state(state[0]["step"])
        values = {name: value for name, value in weights.items()}
        names = {id(weight): name for name, weight in self.heads.named_parameters()}
        for number, weight in enumerate(self.parameters):
            self._set(weight, values[names[id(weight)]], state.get(number, {}))
        self._put(values)
        return None

    def _begin_state(self, step: Tensor) -> None:
        """State as it is after a first step, which is when the inner optimizer makes it."""
        outer = self.model.optimizer
        plain = isinstance(outer.optimizer, torch.optim.AdamW)
        for part in self._parts:
            outer.optimizer.state[part] = {
                "step": step.clone() if plain else int(step),  # DeepSpeed's own counts in int
                **{name: torch.zeros_like(part) for name in MOMENTS},
            }
        if self.stage < 3:
            outer._hp_optimizer_states_linked = False
            outer._lazy_init_hp_params_optimizer_state()

    def _set(self, weight: Any, value: Tensor, state: dict[str, Tensor]) -> None:
        """This process's part of a weight's float32 copy and optimizer state."""
        from deepspeed import utils

        every: dict[str | None, Tensor] = {None: value, **{name: state[name] for name in MOMENTS if name in state}}
        for name, full in every.items():
            full = full.to(weight.device, torch.float32)
            if self.stage < 3 and name is None:
                utils.safe_set_full_fp32_param(weight, full)
            elif self.stage < 3:
                utils.safe_set_full_optimizer_state(weight, full, name)
            elif name is None:
                utils.safe_set_local_fp32_param(weight, _part(weight, full))
            else:
                utils.safe_set_local_optimizer_state(weight, _part(weight, full), name)

    def _put(self, values: dict[str, Tensor]) -> None:
        """The weights and buffers that passes read."""
        from deepspeed.runtime.zero import GatheredParameters

        for name, tensor in self.heads.state_dict(keep_vars=True).items():
            with GatheredParameters([tensor], modifier_rank=0, enabled=hasattr(tensor, "ds_id")), torch.no_grad():
                tensor.copy_(values[name])


def _part(weight: Any, full: Tensor) -> Tensor:
    """What this process holds of a weight that ZeRO-3 spread: equal parts, the last filled up with zeros."""
    group, size = weight.ds_process_group, weight.ds_tensor.numel()
    filled = full.new_zeros(size * torch.distributed.get_world_size(group))
    filled[: full.numel()] = full.flatten()
    return filled[size * torch.distributed.get_rank(group) :][:size]
