"""The clock of a drafter's modules: what a draft costs apart from the Python around it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class ModuleClock:
    """Counts the time inside outermost ``nn.Module`` calls.

    Attributes:
        seconds: counted so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count module calls made in this block; nothing stays registered afterwards, whatever it raises."""
        depth, started = 0, 0.0

        def enter(*_: Any) -> None:
            nonlocal depth, started
            if depth == 0:
                started = time.perf_counter()
            depth += 1

        def leave(*_: Any) -> None:
            nonlocal depth
            depth -= 1
            if depth == 0:
                self.seconds += time.perf_counter() - started

        hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
