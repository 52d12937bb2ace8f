"""Parts of a computation that are done in the precision they are written in, whatever runs around them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def as_written(device: torch.device) -> AbstractContextManager[None]:
    """Autocast off on a device; nothing where a device has none (the meta device, where only shapes are computed)."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
