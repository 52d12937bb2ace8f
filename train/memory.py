"""How much memory a process has used at most."""

from __future__ import annotations

import os
import sys

import torch


def peak_bytes(device: torch.device) -> int:
    """Most bytes held so far: by tensors on an accelerator, by the whole process on a CPU; 0 where none can tell."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if os.name != "posix":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
