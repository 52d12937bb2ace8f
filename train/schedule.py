"""The learning rate as a function of the optimizer step alone, so that resuming needs no stored schedule."""

from __future__ import annotations

import math
from collections.abc import Callable

from train.config import TrainConfig

SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}


def learning_rate(step: int, total: int, config: TrainConfig) -> float:
    """Rate of optimizer step ``step`` (0 is the first) of ``total``.

    Linear warm-up reaches ``lr`` after ``warmup_steps`` steps; from there the shape goes down to ``final_lr`` × lr,
    which it would reach at step ``total``.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    done = (step - config.warmup_steps) / max(1, total - config.warmup_steps)
    return config.lr * (config.final_lr + (1.0 - config.final_lr) * SHAPES[config.schedule](done))
