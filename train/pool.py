"""The target's states from other processes: a feature source that asks ahead, and the pool of workers it asks.

A trainer asks for the batches of a step and of the next ones at once, so that workers compute while it learns. What
they answer is what it would have computed itself, to the bit where the processors are alike: the same batches go
through the same function.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

import torch
from accelerate import Accelerator

from heads.base import DraftHeads
from heads.judge import TrainingBatch
from heads.target import Target
from train.config import RunConfig
from train.conversations import Conversations
from train.features import as_batch, pad_ids
from train.ranks import Ranks
from train.spool import Spool, pauses
from train.storage import Storage
from train.team import SCRIPT, Team, devices_for

PATIENCE = 300.0  # seconds without any living worker before a run gives up
LOOK_SECONDS = 1.0  # between looks whether there is one


class WorkerFeatures:
    """Batches whose states are computed by whoever works in a spool.

    Args:
        name: tells this source's requests from those of others in the spool.
        team: the workers that this process started, None where it started none.
    """

    def __init__(
        self,
        spool: Spool,
        name: str,
        target: Target,
        conversations: Conversations,
        storage: Storage,
        team: Team | None = None,
    ) -> None:
        self.spool, self.name, self.target, self.conversations = spool, name, target, conversations
        self.storage, self.team = storage, team
        self._asked: dict[tuple[int, ...], deque[str]] = {}
        self._serial = 0

    def expect(self, batches: Sequence[Sequence[int]]) -> None:
        """Ask for those that were not asked for yet."""
        for indices, wanted in Counter(tuple(batch) for batch in batches).items():
            for _ in range(wanted - len(self._asked.get(indices, ()))):
                self._ask(indices)

    def _ask(self, indices: tuple[int, ...]) -> None:
        ids, loss_mask, _ = pad_ids(self.conversations, indices)
        name = f"{self._serial:08d}-{self.name}.safetensors"
        self._serial += 1
        self.spool.ask(name, ids, loss_mask)
        self._asked.setdefault(indices, deque()).append(name)

    def batch(self, indices: Sequence[int]) -> TrainingBatch:
        """See :class:`train.features.FeatureSource`.

        Raises:
            ValueError: a worker could not compute it, or there has been no worker for a while.
        """
        key = tuple(indices)
        if not self._asked.get(key):
            self._ask(key)
        name = self._asked[key].popleft()
        if not self._asked[key]:
            del self._asked[key]
        columns = self._wait(name)
        device = self.target.device
        ids, loss_mask, mask = (part.to(device) for part in pad_ids(self.conversations, indices))
        return as_batch(ids, loss_mask, mask, {n: v.to(device) for n, v in columns.items()}, self.storage)

    def _wait(self, name: str) -> dict[str, torch.Tensor]:
        alone_since = looked = time.monotonic()
        for pause in pauses():
            columns = self.spool.answer(name)
            if columns is not None:
                return columns
            now = time.monotonic()
            if now - looked > LOOK_SECONDS:
                looked = now
                if self.team is not None:
                    self.team.check()
                if self.spool.any_worker():
                    alone_since = now
                elif now - alone_since > PATIENCE:
                    raise ValueError(
                        f"no feature worker has been at work in {self.spool.folder} for {PATIENCE:.0f} seconds: start "
                        f"some with `python {SCRIPT} {self.spool.folder} --device DEVICE`"
                    )
            time.sleep(pause)
        raise AssertionError


class Pool:
    """A run's spool, and the workers that it starts on each machine; all processes make it together.

    Raises:
        ValueError: there are too few accelerators for the workers.
        OSError: the spool is another run's, or not every process sees it.
    """

    def __init__(self, config: RunConfig, heads: DraftHeads, accelerator: Accelerator) -> None:
        self.target, self.ranks = heads.target, Ranks(accelerator)
        self.storage = Storage(
            len(heads.config.taps), self.target.hidden_size, getattr(torch, config.data.feature_dtype)
        )
        started, local = config.data.workers, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        devices = devices_for(started, accelerator.device, local)  # the same on every process, so all raise or none
        self.spool = Spool(Path(self.ranks.share(str(_place(config.data.spool_folder)) if self.ranks.main else "")))
        about = {
            "target": asdict(config.target),
            "identity": self.target.identity().to_dict(),
            "taps": list(heads.config.taps),
            "feature_dtype": config.data.feature_dtype,
            "kernels": config.train.kernels,
        }
        self.ranks.on_main(lambda: self.spool.create(about), f"making {self.spool.folder}")
        unseen = None if self.spool.about() else OSError("data.spool_folder must be on a disk that all machines share")
        self.ranks.all_succeed(unseen, f"looking into {self.spool.folder}")
        self.team: Team | None = None
        if devices and accelerator.is_local_main_process:
            self.team = Team(self.spool.folder, devices, Path(config.output.folder))
        self._sources = 0

    def source(self, conversations: Conversations) -> WorkerFeatures:
        """Batches of these conversations; all processes make the same sources in the same order."""
        name = f"{self.ranks.index:05d}-{self._sources}"
        self._sources += 1
        return WorkerFeatures(self.spool, name, self.target, conversations, self.storage, self.team)

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.spool.let_go()
        if self.team is not None:
            self.team.close()
        if self.ranks.main:
            self.spool.remove()


def _place(named: str | None) -> Path:
    """The folder asked for, else one of this run's own, in memory where there is such a place."""
    if named is not None:
        return Path(named)
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="headstart-spool-", dir=memory if memory.is_dir() else None))
