"""On what a figure was measured: the accelerator's name, or the processor's with the cores this process may use."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def machine(device: torch.device | str = "cpu") -> str:
    """Such as ``NVIDIA H100 80GB HBM3`` or ``AMD EPYC 9B14, 2 cores``."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{_processor()}, {cores} core{'' if cores == 1 else 's'}"


def _processor(listing: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name where the system tells it, else its architecture."""
    try:
        lines = listing.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next((name for name in named if name), "") or platform.processor() or platform.machine()
