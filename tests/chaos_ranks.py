"""Kills of one process of several that train together: a rank, or the launcher, drawn from the clock.

A life is torchrun's own agent with its ranks over gloo. When one of them is killed the others must end by themselves,
soon and all of them; then the next life goes on. Used by ``tests/chaos.py --processes 2``.
"""

from __future__ import annotations

import os
import re
import signal
import struct
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.chaos import CHUNK, STAGES, Chaos
from tests.train.world import alive
from train import assemble, train_heads
from train.interrupt import follow_launcher

PLACE = struct.Struct("=i")  # of a process id, behind the two bytes of the stage
GONE = 90.0  # seconds after a kill; torchrun itself gives its ranks 30
STOPPED = re.compile(r"run/checkpoints/(step-\d{8})/")


@dataclass
class ChaosOfRanks(Chaos):
    """Kills of one process of each life.

    Attributes:
        processes: ranks.
        victims: who was killed → how often.
    """

    waits: ClassVar[list[tuple[str, ...]]] = [
        ("preparing",),
        ("building states", "writing states"),
        ("accumulating",),
        ("saving",),
        ("accumulating",),
        STAGES,
    ]
    processes: int = 2
    victims: Counter[str] = field(default_factory=Counter)

    def _live(self, run: Path) -> None:
        """The launcher of a life."""
        self._tell_ids([0] * self.processes)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self.processes,
            run_id="chaos",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.02,
            start_method="fork",
            logs_specs=DefaultLogsSpecs(log_dir=str(self.folder / "elastic")),
        )
        elastic_launch(config, self._rank)(run)

    def _rank(self, run: Path) -> None:
        rank = int(os.environ["RANK"])
        PLACE.pack_into(self.stage, 4 * (rank + 1), os.getpid())
        follow_launcher()
        self._watched()
        if rank == 0:
            assemble.prepare = self._marked(
                partial(assemble.prepare, chunk=CHUNK, processes=1), "preparing", "starting"
            )
        else:  # the stage is the first one's
            self._enter = lambda stage: None  # type: ignore[method-assign]
        status = train_heads.main(self._arguments(run, self.folder / "train.jsonl"))
        if status:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _tell_ids(self, ids: list[int]) -> None:
        for rank, number in enumerate(ids):
            PLACE.pack_into(self.stage, 4 * (rank + 1), number)

    def _end(self, child: int, run: Path) -> None:
        """Kill one, and wait for the others to end by themselves."""
        ranks = [PLACE.unpack_from(self.stage, 4 * (rank + 1))[0] for rank in range(self.processes)]
        known = {"launcher": child} | {f"rank {rank}": number for rank, number in enumerate(ranks) if number}
        victim = self.dice.choice(sorted(known))
        self.victims[victim] += 1
        os.kill(known[victim], signal.SIGKILL)
        deadline = time.monotonic() + GONE
        while left := [name for name, number in known.items() if alive(number)]:
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                raise AssertionError(f"{victim} was killed, and {', '.join(left)} went on: see {run / 'said.txt'}")
            time.sleep(0.01)
        os.waitpid(child, 0)

    def _files(self, run: Path) -> set[str]:
        """Without checkpoints before the last: a life that is asked to stop writes one wherever it is."""
        found = super()._files(run)
        last = max((match[1] for name in found if (match := STOPPED.match(name))), default="")
        return {name for name in found if not (match := STOPPED.match(name)) or match[1] == last}
