"""Feature workers that a run starts on its own machine: where they run, and whether they still do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

SCRIPT = Path(__file__).resolve().with_name("feature_worker.py")
TAIL = 2000  # characters of a dead worker's log that are shown
LEAVE_SECONDS = 20.0  # for workers to notice that their run has ended
# what tells a process that it is one of several
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "ACCELERATE_", "FSDP_")


class Team:
    """Workers of this machine, started by a run; they end with it.

    Raises:
        ValueError: there are not as many accelerators that do not train.
    """

    def __init__(self, spool: Path, devices: Sequence[str], logs: Path) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHED)}
        self.logs = [logs / f"feature-worker-{number}.log" for number in range(len(devices))]
        self.processes: list[subprocess.Popen[bytes]] = []
        for device, log in zip(devices, self.logs, strict=True):
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("wb") as file:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, str(SCRIPT), str(spool), "--device", device],
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=file,
                        env=environ,
                        start_new_session=True,  # Ctrl-C is the run's, which still needs them for its last steps
                    )
                )

    def check(self) -> None:
        """Whether one is left.

        Raises:
            ValueError: all have ended; shows why.
        """
        ended = [process.poll() for process in self.processes]
        if all(status is not None for status in ended):
            text = self.logs[0].read_text(encoding="utf-8", errors="replace")[-TAIL:].strip()
            raise ValueError(f"all feature workers have ended (status {ended[0]}), see {self.logs[0]}: {text}")

    def close(self) -> None:
        """Wait for their end, once the run has let go of the spool."""
        for process in self.processes:
            try:
                process.wait(LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def devices_for(workers: int, device: torch.device, trainers: int) -> list[str]:
    """Where a machine's workers run: on its processor, or on the accelerators behind those that train.

    Args:
        trainers: processes of the run on this machine.

    Raises:
        ValueError: there are too few accelerators.
    """
    if device.type == "cpu":
        return ["cpu"] * workers
    there = torch.cuda.device_count()
    if trainers + workers > there:
        raise ValueError(
            f"data.workers is {workers}, but of this machine's {there} GPUs {trainers} train: launch with at most "
            f"--num_processes {max(1, there - workers)}, or start workers elsewhere (data.workers 0)"
        )
    return [f"cuda:{trainers + number}" for number in range(workers)]
