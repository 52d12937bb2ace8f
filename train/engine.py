"""How training runs over processes: what every engine does. This one is a single process, or several under DDP.

=============  ==========================  ===========================================================
engine         what is spread              launched by
=============  ==========================  ===========================================================
:class:`Engine`  nothing                   ``python``, ``torchrun``, ``accelerate launch``
``engine_zero``  ZeRO-1 optimizer state,   ``accelerate launch --use_deepspeed``
                 ZeRO-2 and gradients,
                 ZeRO-3 and weights
``engine_fsdp``  all three                 ``accelerate launch --use_fsdp --fsdp_version 2``, or
                                           ``train.engine: fsdp2`` under any launcher
=============  ==========================  ===========================================================

Heads are gathered and spread as one piece: they are small beside what they save in optimizer state, and so any kind of
heads may read its weights as it likes. All engines give and take the same weights and optimizer state, so a run can be
continued by another engine or by another number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from heads.base import DraftHeads
from heads.kinds import build
from train.spread import whole
from train.step import Step

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Engine:
    """One process, or several of which each has all weights.

    Args:
        step: what is trained; its heads in the dtype they are trained in, on the device.
        make: makes the optimizer of parameters.

    Attributes:
        name: as the report gives it.
        step: the module, for passes without the engine.
        expected: the heads' tensors as they must be when they are whole, without values.
        parameters: of the heads, those that are trained.
        trained: values in them.
        optimizer: whose groups' learning rate can be set.
    """

    name = "ddp"

    def __init__(self, accelerator: Accelerator, step: Step, make: MakeOptimizer) -> None:
        self.accelerator, self.step, self.heads = accelerator, step, step.inner.heads
        # as they are while no engine has spread them
        self.expected = {
            name: torch.empty_like(tensor, device="meta") for name, tensor in self.heads.state_dict().items()
        }
        self.trained = sum(weight.numel() for weight in _trained(self.heads))
        self.model, self.optimizer = self._prepare(make)
        self.parameters = [weight for weight in self.heads.parameters() if weight.requires_grad]

    def _prepare(self, make: MakeOptimizer) -> tuple[Any, Any]:
        model, optimizer = self.accelerator.prepare(self.step, make(_trained(self.heads)))
        return model, optimizer

    # a step

    @contextmanager
    def accumulating(self, last: bool) -> Iterator[None]:
        """Context of a micro-batch's passes; gradients are averaged over processes at the ``last``."""
        self.accelerator.sync_gradients = last
        if last:
            yield
        else:
            with self.accelerator.no_sync(self.model):
                yield

    def backward(self, loss: Tensor) -> None:
        """Add a micro-batch's gradient."""
        self.accelerator.backward(loss)

    flattens: str | None = None
    """Who gives the optimizer flat parts of the weights; None where it is given matrices."""

    takes_early = False
    """Whether the last backward pass has already moved the weights."""

    def clip(self, limit: float) -> float | None:
        """Scale the gradient down to a norm (0: leave it); what the norm was, None where the engine does not tell."""
        return float(self.accelerator.clip_grad_norm_(self.parameters, limit or float("inf")))

    def update(self) -> None:
        """Move the weights and forget the gradient."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    # all of it in one place; all processes call these

    def weights(self) -> dict[str, Tensor]:
        """Tensors of the heads by name, whole, on the CPU.

        Raises:
            RuntimeError: one has not its full shape (a fault of the program: what is saved would be no heads).
        """
        found = {name: whole(tensor).cpu() for name, tensor in self.heads.state_dict(keep_vars=True).items()}
        wrong = [
            f"{name} is {tuple(tensor.shape)} where {tuple(self.expected[name].shape)} is expected"
            for name, tensor in found.items()
            if tensor.shape != self.expected[name].shape
        ]
        if wrong:
            raise RuntimeError(f"weights could not be put together from the processes: {'; '.join(wrong)}")
        return found

    def whole_heads(self) -> DraftHeads:
        """Heads with all weights in this process: a copy, on the CPU, which training does not touch."""
        weights = self.weights()
        with torch.random.fork_rng(devices=[]):  # what training draws does not hang on copies
            copy = build(self.heads.config, self.heads.target, check=False)
        copy.to(next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point()))
        copy.load_state_dict(weights)
        return copy

    def moments(self) -> dict[str, Tensor]:
        """The optimizer's state as ``NUMBER.NAME``, by number of the weight in its groups; on the CPU."""
        state = self.optimizer.state_dict()["state"]
        return {
            f"{number}.{name}": whole(torch.as_tensor(value)).cpu().contiguous()
            for number, entry in state.items()
            for name, value in entry.items()
        }

    def restore(self, weights: dict[str, Tensor], moments: dict[str, Tensor]) -> None:
        """Take over what :meth:`weights` and :meth:`moments` gave, of this or another engine."""
        self.heads.load_state_dict(weights)
        self.optimizer.load_state_dict(
            {"state": by_number(moments), "param_groups": self.optimizer.state_dict()["param_groups"]}
        )


def _trained(heads: DraftHeads) -> list[nn.Parameter]:
    return [weight for weight in heads.parameters() if weight.requires_grad]


def by_number(moments: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Parameter number → name → value."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in moments.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    return state
