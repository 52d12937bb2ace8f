"""Several training runs under several engines in one group of processes: launching one for each would take minutes.

Launched by torchrun with a JSON file of runs, each an engine, the script's arguments and possibly a planted mistake.
Each leaves its run folder as any launch does, and in it how many weights each process held.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from tests.train.world import half_way
from train import train_heads
from train.engine import Engine
from train.loop import Trainer


def launched(engine: str, configs: str) -> dict[str, str]:
    """What the launchers set for an engine."""
    if not engine.startswith("zero"):
        return {"ACCELERATE_USE_CPU": "true"}
    file = f"{configs}/{engine}.json"
    return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": file}


class Watched(Trainer):
    """Notes at the end what this process holds of the target's layers and of the heads."""

    def run(self) -> None:
        super().run()
        held = {"target": here(self.heads.target.layers), "heads": here(self.heads)}
        every = self.ranks.collect(held)
        if self.ranks.main:
            (self.folder / "held.json").write_text(json.dumps(every))


def here(module: nn.Module) -> int:
    """Values in this process."""
    return sum(_local(weight) for weight in module.parameters())


def _local(weight: Any) -> int:
    if isinstance(weight, DTensor):
        return weight.to_local().numel()
    return weight.ds_tensor.numel() if hasattr(weight, "ds_id") and not weight.numel() else weight.numel()


def never_averaged(self: Engine, last: bool) -> Any:
    """A mistake: each process goes its own way."""
    return self.model.no_sync()


MISTAKES = {"never averaged": never_averaged}


def main() -> int:
    """Run them all."""
    runs, configs = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2]
    Accelerator.end_training = lambda self: None  # which takes the group down
    train_heads.Trainer = Watched  # type: ignore[misc]
    right = Engine.accumulating
    for run in runs:
        if "half_of" in run:
            if os.environ["RANK"] == "0":
                half_way(Path(run["half_of"]), Path(run["folder"]))
            distributed.barrier()
        settings = launched(run["engine"], configs)
        os.environ.update(settings)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        Engine.accumulating = MISTAKES.get(run.get("mistake"), right)  # type: ignore[method-assign]
        train_heads.train(run["arguments"])
        for name in settings:
            del os.environ[name]
    return 0


if __name__ == "__main__":
    train_heads.leave(main())
