"""What each process of test_launch's group test runs: the end of a run in the order in which it once hung.

A worker thread of gloo still has a collective's tensor to drop, for which it needs the interpreter's lock, when DDP's
reducer is freed under that lock. With the word ``forget`` the group is not held, and the end must be a hang.
"""

from __future__ import annotations

import faulthandler
import sys
import time

import torch
import torch.distributed as distributed
from torch.nn.parallel import DistributedDataParallel

from train import launch
from train.config import RunConfig

HANGS_AFTER = 8.0  # seconds; the watchdog needs no lock


def main() -> int:
    """0 when both processes came to their end."""
    accelerator = launch.start(RunConfig())
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    if "forget" in sys.argv:
        launch._GROUPS.clear()
    accelerator.wait_for_everyone()
    faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
    if accelerator.process_index:
        time.sleep(1)  # the other's collective is under way, and what it holds is gone, when this one joins in
        distributed.broadcast(torch.ones(3), src=1)
    else:
        distributed.broadcast(torch.zeros(3), src=1, async_op=True)
    distributed.destroy_process_group()
    del model
    if not accelerator.process_index:
        time.sleep(3)  # the other is still to be answered
    return 0


if __name__ == "__main__":
    from train.train_heads import leave

    leave(main())
