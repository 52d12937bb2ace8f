"""Which engine runs: the one that was launched, or that ``train.engine`` asks for."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import DistributedType

from train.config import RunConfig
from train.engine import Engine, MakeOptimizer
from train.engine_fsdp import Fsdp
from train.engine_zero import Zero
from train.optimizer import refuse_parts
from train.step import Step

LAUNCHED: dict[DistributedType, type[Engine]] = {DistributedType.DEEPSPEED: Zero, DistributedType.FSDP: Fsdp}
ASKED: dict[str, type[Engine]] = {"fsdp2": Fsdp}


def start_engine(config: RunConfig, accelerator: Accelerator, step: Step, make: MakeOptimizer) -> Engine:
    """Put ``step`` under the run's engine.

    Raises:
        LaunchError: another engine than was asked for would run.
        SettingsError: the optimizer is none for this engine.
    """
    kind = ASKED.get(config.train.engine) or LAUNCHED.get(accelerator.distributed_type, Engine)
    if kind.flattens is not None:
        refuse_parts(config.train, kind.flattens)
    return kind(accelerator, step, make)
