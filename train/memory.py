"""How much memory a process uses and has used at most, and how much is free."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch


def peak_bytes(device: torch.device) -> int:
    """Most bytes held so far: by tensors on an accelerator, by the whole process on a CPU; 0 where none can tell."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if os.name != "posix":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def available_bytes(device: torch.device) -> int:
    """Free memory of the device, or of the machine; 0 where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return 0
