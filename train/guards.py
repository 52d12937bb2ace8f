"""What stops a run in time: numbers that are not finite, memory that ran out, a target that is not as asked.

Each says what to do. Weights that a bad step would have spoiled are not touched by it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from heads.target import Target
from train.files import write_whole
from train.ranks import Ranks

SHOWN = 8  # row ids in a message; the file has all


@dataclass(frozen=True)
class BadBatch:
    """A micro-batch whose loss or gradient is not finite.

    Attributes:
        process, micro_batch: whose, and which of the step, counted from 0 and 1.
        loss: what it was; where only the gradient was not, "finite loss".
        rows: ids of its conversations, as the prepared data names them.
    """

    process: int
    micro_batch: int
    loss: str
    rows: list[str]


def refuse_not_finite(
    folder: Path, step: int, what: str, mine: list[BadBatch], lr: float, ranks: Ranks, *, taken: bool = False
) -> None:
    """Stop every process, with the rows of every process's bad micro-batches in a file and in the message.

    Args:
        step: counted from 1.
        what: "loss" or "gradient".
        taken: the engine has moved the weights already, so those in memory are spoilt.

    Raises:
        ValueError: always, on every process.
    """
    batches = [batch for part in ranks.collect(mine) for batch in part]
    rows = [row for batch in batches for row in batch.rows]
    path = folder / f"not-finite-step-{step}.json"
    content = {"step": step, "what": what, "lr": lr, "batches": [asdict(batch) for batch in batches]}
    ranks.on_main(lambda: write_whole(path, json.dumps(content, indent=1) + "\n"), f"writing {path}")
    losses = ", ".join(sorted({batch.loss for batch in batches}))
    more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
    raise ValueError(
        f"the {what} of step {step} is not finite ({losses}){'' if taken else ', so the step was not taken'}. Rows of "
        f"the batch: {', '.join(rows[:SHOWN])}{more}; all are in {path}. Look at these rows, or lower train.lr; the "
        "newest checkpoint is from before this step"
    )


def is_finite(value: torch.Tensor | float | None) -> bool:
    """Whether a loss or a norm is a number to go on with; an engine that tells no norm is believed."""
    return value is None or math.isfinite(float(value))


class OutOfMemory(ValueError):
    """Memory ran out; says what to lower."""


@contextmanager
def memory_advice(where: str, lower: str) -> Iterator[None]:
    """Turn running out of memory into one line that says ``where`` and what to ``lower``.

    Raises:
        OutOfMemory: the memory of the device, or of the machine, is not enough.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise OutOfMemory(f"out of memory {where}: {lower}") from error
    except RuntimeError as error:
        if "can't allocate memory" not in str(error) and "out of memory" not in str(error).lower():
            raise
        raise OutOfMemory(f"out of memory {where}: {lower}") from error


def check_target(target: Target, asked: torch.dtype) -> None:
    """Before its states are taken for the target's own.

    Raises:
        ValueError: a weight is in another dtype than asked for or takes gradients, or a part of it is in train mode.
    """
    model = target.model
    learning = [name for name, weight in model.named_parameters() if weight.requires_grad]
    if learning:
        raise ValueError(
            f"{target.name} is not frozen ({learning[0]} takes gradients): call model.requires_grad_(False)"
        )
    training = [name or type(model).__name__ for name, module in model.named_modules() if module.training]
    if training:
        raise ValueError(
            f"{target.name} is in train mode ({training[0]}{' and others' if len(training) > 1 else ''}), so dropout "
            "may be on and its states are not those it decodes with: call model.eval() and leave it so"
        )
    if getattr(model, "is_quantized", False) or getattr(model.config, "quantization_config", None):
        return  # what is not quantized is kept in what the quantizer needs
    kept = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    others = {
        name: weight.dtype
        for name, weight in model.named_parameters()
        if weight.is_floating_point()
        and weight.dtype != asked
        and not (weight.dtype == torch.float32 and any(part in name.split(".") for part in kept))
        and "lora_" not in name  # an adapter may be kept wider than the model it sits on
    }
    if others:
        name, dtype = next(iter(others.items()))
        raise ValueError(
            f"{target.name} was asked for in {_short(asked)}, but {name} is {_short(dtype)}"
            f"{f' and {len(others) - 1} more are not' if len(others) > 1 else ''}: set target.dtype to "
            f"{_short(dtype)}, or load it in {_short(asked)}"
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
