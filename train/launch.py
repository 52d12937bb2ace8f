"""Starting ``accelerate`` and making sure that what was asked for is what runs.

Some launches on CPU quietly become something else (fewer processes, plain data parallel). Each is refused here
with the launch that works.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import DistributedType, ProjectConfiguration, set_seed

from train.config import RunConfig

WAIT = timedelta(hours=2)  # one process may prepare data while the others wait

# The process group, held to the end of the process. Its last holder would otherwise be DDP's reducer, whose end joins
# gloo's worker threads without letting go of the interpreter's lock, for which a worker waits that has yet to drop the
# tensors of its last collective: a run that had written everything then hung, once in a few under load.
_GROUPS: list[Any] = []

SEVERAL = (
    "for several processes on CPU use `ACCELERATE_USE_CPU=true accelerate launch --config_file "
    "configs/accelerate/cpu2.yaml train/train_heads.py` or `ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 "
    "train/train_heads.py`"
)
DEEPSPEED = (
    "for DeepSpeed on CPU use `DS_ACCELERATOR=cpu accelerate launch --config_file configs/accelerate/zero2.yaml "
    "--num_processes 2 train/train_heads.py` without ACCELERATE_USE_CPU or --cpu"
)
FSDP = (
    "for FSDP2 use `accelerate launch --config_file configs/accelerate/fsdp2.yaml train/train_heads.py` on GPUs, and "
    "on CPU `ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 train/train_heads.py --train.engine fsdp2`"
)
OURS = {  # what a DeepSpeed configuration may not say, and where it is said instead
    "optimizer": "train.lr and its neighbours",
    "scheduler": "train.schedule",
    "bf16": "train.precision",
    "fp16": "train.precision",
    "torch_autocast": "train.precision",
}


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
        raise LaunchError(f"FSDP was asked for, but {kind.value} would run: {FSDP}")
    if kind == DistributedType.FSDP and environ.get("FSDP_VERSION", "1") != "2":
        raise LaunchError(f"FSDP1 was asked for, which is not supported: {FSDP}")
    asked = int(environ.get("WORLD_SIZE", "1"))
    if asked > 1 and processes != asked:
        raise LaunchError(f"{asked} processes were launched, but each runs for itself: {SEVERAL}")
    # `accelerate launch --cpu --num_processes 2` sets a rendezvous address and then starts one process
    alone = processes == 1 and "MASTER_ADDR" in environ and not {"RANK", "WORLD_SIZE"} & environ.keys()
    if alone and "ACCELERATE_MIXED_PRECISION" in environ:
        raise LaunchError(f"several processes were asked for, but one was started: {SEVERAL}")


def check_engine(config: RunConfig, kind: DistributedType, processes: int, grouped: bool, stage: int | None) -> None:
    """Compare the settings that name engines with the launch.

    Args:
        grouped: whether there is a process group (also one of a single process).
        stage: of ZeRO, None without DeepSpeed.

    Raises:
        LaunchError: they do not go together; says what does.
    """
    fsdp = config.train.engine == "fsdp2" or kind == DistributedType.FSDP
    if config.train.engine == "fsdp2" and stage is not None:
        raise LaunchError("train.engine is fsdp2, but DeepSpeed was launched: " + FSDP)
    if fsdp and not grouped:
        raise LaunchError(f"train.engine is fsdp2, but {processes} process was started by itself: {FSDP}")
    placement = config.target.placement
    if placement == "sharded" and stage != 3 and not fsdp:
        raise LaunchError(
            "target.placement is sharded, which only ZeRO-3 and FSDP2 do: launch with --config_file "
            "configs/accelerate/zero3.yaml or fsdp2.yaml, or set it to outside"
        )
    if placement == "sharded" and (config.target.adapter or config.target.quantization != "none"):
        raise LaunchError(
            "target.placement is sharded, which is for plain weights: merge target.adapter into the target first and "
            "leave target.quantization out, or set it to outside"
        )
    if placement == "inside" and fsdp:
        raise LaunchError(
            "target.placement is inside, but FSDP2 is given the heads alone: set it to outside or sharded"
        )


def start(config: RunConfig) -> Accelerator:
    """The run's ``Accelerator``, checked and seeded.

    Raises:
        LaunchError: see :func:`check_launch` and :func:`check_engine`.
    """
    # alone there is no group to set up, and accelerate takes a backend as a sign that there is one
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    backend = "gloo" if os.environ.get("DS_ACCELERATOR") == "cpu" else None
    if backend and _on(os.environ, "ACCELERATE_USE_DEEPSPEED"):
        _compile_nothing()
    accelerator = Accelerator(
        mixed_precision="no",  # the heads' own step casts (train/step.py), the same under every engine
        log_with=None if config.tracker.kind == "none" else config.tracker.kind,
        project_config=ProjectConfiguration(project_dir=config.output.folder, logging_dir=config.output.folder),
        kwargs_handlers=[InitProcessGroupKwargs(backend=backend, timeout=WAIT)] if several else None,
    )
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    if grouped:
        _GROUPS.append(torch.distributed.group.WORLD)
    check_launch(os.environ, accelerator.distributed_type, accelerator.num_processes)
    plugin = accelerator.state.deepspeed_plugin
    stage = int(plugin.zero_stage) if plugin is not None else None
    check_engine(
        config,
        accelerator.distributed_type,
        accelerator.num_processes,
        grouped,
        stage,
    )
    if plugin is not None:
        _settle(plugin, config)
    set_seed(config.train.seed)
    return accelerator


def _compile_nothing() -> None:
    """On CPU DeepSpeed would compile an operator at its first use, which takes half a minute and a compiler, and for
    which everyone waits for ever when a build was once killed. Gloo does the same."""
    import deepspeed.ops

    getattr(deepspeed.ops, "__compatible_ops__", {})["deepspeed_shm_comm"] = False


def _settle(plugin: Any, config: RunConfig) -> None:
    """Put into DeepSpeed's configuration what the run decides.

    Raises:
        LaunchError: it decides something itself that the recipe decides.
    """
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    settings = plugin.deepspeed_config
    for name, ours in OURS.items():
        if settings.get(name) and settings[name].get("enabled", True) not in (False, "auto"):
            raise LaunchError(f"DeepSpeed's configuration has a section {name}, which is set by {ours}: leave it out")
    settings["train_micro_batch_size_per_gpu"] = 1  # batches are formed here, not by DeepSpeed
    settings["gradient_accumulation_steps"] = 1  # and so are accumulation boundaries
    settings["gradient_clipping"] = config.train.clip or 1e9  # 0 would not turn it off
    settings["zero_allow_untested_optimizer"] = True
    # else every model that transformers loads from now on would be spread (see train/targets.py)
    unset_hf_deepspeed_config()
