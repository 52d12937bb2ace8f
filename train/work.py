"""How much computing a planned run is, and the hours that it takes where so much is done a second.

Operations are counted, not timed: short passes run under torch's counter, and a quadratic through them gives a pass
of any size, as for memory (:mod:`train.estimate`). A multiplication with an addition is two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, shape_wrapper

from train.batches import by_length
from train.cache_build import BUILD_TOKENS
from train.config import RunConfig
from train.conversations import Conversations
from train.estimate import LENGTHS
from train.needs import StepPlan

RATES = (100e12, 200e12, 400e12)
"""Operations a second that a GPU really does, for orientation: 400e12 is two fifths of the 989e12 that NVIDIA's data
sheet gives an H100 in bfloat16 without sparsity, which large training runs reach or miss a little."""


def attention(query: Sequence[int], key: Sequence[int], *rest: Any, **more: Any) -> int:
    """Operations of fused attention of queries (…, T, D) over keys (…, S, D), of shapes; several query heads may share
    a key head, which torch's own formula refuses, and what causality leaves out is counted."""
    *many, rows, width = query
    return 4 * math.prod(many) * rows * key[-2] * width


FUSED = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    **{getattr(torch.ops.aten, f"_scaled_dot_product_{name}"): shape_wrapper(attention) for name in FUSED},
}


class Operations(TorchDispatchMode):
    """Counts floating-point operations of matrix products and attention, by torch's formulas.

    torch's own counter also tells them by module, for which it hooks into autograd in a way that does not go together
    with gradients that are taken inside a forward pass, as :mod:`heads.chunked` takes them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One operation; those that torch knows only as several others are taken apart."""
        kwargs, formula = kwargs or {}, FORMULAS.get(func.overloadpacket)
        if formula is None:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        if formula is not None:
            self.total += int(formula(*args, **kwargs, out_val=out))
        return out


def counted(action: Callable[[], object]) -> int:
    """Floating-point operations of matrix products and attention."""
    with Operations() as found:
        action()
    return found.total


class PassWork:
    """Operations of a pass over (texts, padded length), from passes over one text."""

    def __init__(self, take: Callable[[int], object]) -> None:
        took = [counted(partial(take, length)) for length in LENGTHS]
        system = np.array([[1.0, length, length**2] for length in LENGTHS])
        self.fixed, self.linear, self.square = np.linalg.lstsq(system, np.array(took, float), rcond=None)[0]

    def __call__(self, texts: int, length: int) -> float:
        """Of so many texts, padded to so many tokens."""
        return float(texts * (self.fixed + self.linear * length + self.square * length**2))


def of_run(
    config: RunConfig, conversations: Conversations, plan: StepPlan, steps: int, training: PassWork, states: PassWork
) -> dict[str, Any]:
    """Operations of all steps and of the target's states, and hours at :data:`RATES` on one GPU.

    Args:
        plan: of an epoch's steps.
        steps: of the whole run.
        training, states: of a pass of the heads, forward and backward, and of the target's.
    """
    epochs, lengths = steps / plan.steps, conversations.lengths
    heads = epochs * _sum(training, ((1, int(length)) for length in lengths))
    if config.data.features == "cached":  # every conversation once, in passes of like length
        groups = by_length(lengths, BUILD_TOKENS)
        target = _sum(states, ((len(group), int(lengths[group].max())) for group in groups))
    else:
        target = epochs * _sum(states, ((1, int(length)) for length in lengths))
    tokens = int(lengths.sum())
    return {
        "heads": heads,
        "target": target,
        "total": heads + target,
        "heads_per_token": heads / (epochs * tokens),
        "target_per_token": target / (tokens if config.data.features == "cached" else epochs * tokens),
        "tokens_trained": epochs * tokens,
        "gpu_hours": {f"{rate / 1e12:g} TFLOP/s": (heads + target) / rate / 3600 for rate in RATES},
    }


def _sum(work: PassWork, shapes: Iterable[tuple[int, int]]) -> float:
    return sum(work(*shape) for shape in shapes)
