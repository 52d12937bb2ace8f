"""Starting ``accelerate`` and making sure that what was asked for is what runs.

Some launches on CPU quietly become something else (fewer processes, plain data parallel). Each is refused here
with the launch that works.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta

from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import DistributedType, ProjectConfiguration, set_seed

from train.config import RunConfig

WAIT = timedelta(hours=2)  # one process may prepare data while the others wait

SEVERAL = (
    "for several processes on CPU use `ACCELERATE_USE_CPU=true accelerate launch --config_file "
    "configs/accelerate/cpu2.yaml train/train_heads.py` or `ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 "
    "train/train_heads.py`"
)
DEEPSPEED = (
    "for DeepSpeed on CPU use `DS_ACCELERATOR=cpu accelerate launch --use_deepspeed --num_processes 2 "
    "--deepspeed_config_file configs/deepspeed/zero2.json train/train_heads.py` without ACCELERATE_USE_CPU or --cpu"
)


class LaunchError(ValueError):
    """The launch asked for one thing and another would have run."""


def _on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").lower() in ("1", "true", "yes", "on")


def check_launch(environ: Mapping[str, str], kind: DistributedType, processes: int) -> None:
    """Compare what the environment asks for with what accelerate made of it.

    Raises:
        LaunchError: they differ; says how to launch.
    """
    if _on(environ, "ACCELERATE_USE_DEEPSPEED") and kind != DistributedType.DEEPSPEED:
        raise LaunchError(f"DeepSpeed was asked for, but {kind.value} would run: {DEEPSPEED}")
    if _on(environ, "ACCELERATE_USE_FSDP") and kind != DistributedType.FSDP:
        raise LaunchError(f"FSDP was asked for, but {kind.value} would run: FSDP needs accelerators; {SEVERAL}")
    asked = int(environ.get("WORLD_SIZE", "1"))
    if asked > 1 and processes != asked:
        raise LaunchError(f"{asked} processes were launched, but each runs for itself: {SEVERAL}")
    # `accelerate launch --cpu --num_processes 2` sets a rendezvous address and then starts one process
    alone = processes == 1 and "MASTER_ADDR" in environ and not {"RANK", "WORLD_SIZE"} & environ.keys()
    if alone and "ACCELERATE_MIXED_PRECISION" in environ:
        raise LaunchError(f"several processes were asked for, but one was started: {SEVERAL}")


def start(config: RunConfig) -> Accelerator:
    """The run's ``Accelerator``, checked and seeded.

    Raises:
        LaunchError: see :func:`check_launch`.
    """
    # alone there is no group to set up, and accelerate takes a backend as a sign that there is one
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    backend = "gloo" if os.environ.get("DS_ACCELERATOR") == "cpu" else None
    accelerator = Accelerator(
        mixed_precision=config.train.precision,
        log_with=None if config.tracker.kind == "none" else config.tracker.kind,
        project_config=ProjectConfiguration(project_dir=config.output.folder, logging_dir=config.output.folder),
        kwargs_handlers=[InitProcessGroupKwargs(backend=backend, timeout=WAIT)] if several else None,
    )
    check_launch(os.environ, accelerator.distributed_type, accelerator.num_processes)
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None:
        if plugin.zero_stage > 2:
            raise LaunchError(f"ZeRO stage {plugin.zero_stage} is not supported yet: use stage 1 or 2")
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1  # batches are formed here, not by DeepSpeed
        plugin.deepspeed_config["gradient_accumulation_steps"] = 1  # and so are accumulation boundaries
        plugin.deepspeed_config["gradient_clipping"] = config.train.clip or 1e9  # 0 would not turn it off
    set_seed(config.train.seed)
    return accelerator
