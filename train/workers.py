"""Independent passes of a model side by side on a CPU: one pass a core instead of one pass on all cores.

A pass that is spread over cores waits at each of its hundreds of operations for the slowest core, which on a shared
machine is whichever is doing something else. Passes that do not wait for each other lose only what is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(
    function: Callable[[Item], Result], items: Sequence[Item], device: torch.device, workers: int | None = None
) -> Iterator[Result]:
    """``function`` of each item, results in order.

    Args:
        function: calls PyTorch, which runs outside Python's lock; must not share what it writes with another call.
        items: what it is called with.
        device: where it computes; anything but a CPU gets one call after another.
        workers: calls at once; as many as PyTorch has threads by default, each of which gets one of them.
    """
    threads = torch.get_num_threads()
    workers = threads if workers is None else workers
    if device.type != "cpu" or workers < 2:
        yield from map(function, items)
        return
    pool = ThreadPoolExecutor(workers, initializer=lambda: torch.set_num_threads(1))
    try:
        yield from pool.map(function, items)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(threads)  # part of the setting is the process's, not the thread's
