"""Runs trainers on one hand-over, each run in a fresh process, and checks what each says that it trained."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from train.batches import plan_epoch
from train.cache_spec import CacheSpec
from train.config import RunConfig
from train.peers import meter
from train.peers.environments import PEERS, Peer
from train.peers.handover import Handover
from train.peers.inside.job import RESULT, Job, described, digest

HERE = Path(__file__).resolve().parent
WARM_UP = 2  # steps at the start that are not timed: memory is fetched and code is loaded in them


@dataclass(frozen=True)
class Contender:
    """One trainer in one way of use; ``peer`` is None for ours; ``batches`` are the tokens of a step that are tried."""

    name: str
    peer: Peer | None
    features: str
    batches: tuple[int, ...]

    @property
    def ours(self) -> bool:
        """Whether it is this project's."""
        return self.peer is None


CONTENDERS = (
    Contender("headstart, cached", None, "cached", (1024, 2048, 4096)),
    Contender("economize, online", PEERS["economize"], "online", (512, 1024, 2048, 4096)),
    Contender("headstart, online", None, "online", (1024, 2048, 4096)),
    Contender("speculators, cached", PEERS["speculators"], "cached", (512, 1024, 2048, 4096)),
)


@dataclass(frozen=True)
class Run:
    """A run that is over.

    Attributes:
        batch: about how many tokens a step had.
        process: what the whole process took, start and all.
        result: what the trainer wrote (``inside/job.py``), and ``timed`` its steps behind the first ``WARM_UP``.
        folder: what it wrote into.
    """

    contender: Contender
    batch: int
    process: meter.Metered
    result: dict[str, Any]
    folder: Path

    @property
    def timed(self) -> list[dict[str, Any]]:
        """Steps that count."""
        return self.result["steps"][WARM_UP:]

    def rate(self, what: str = "tokens", of: str = "seconds") -> float:
        """Tokens (or ``supervised`` tokens) a second of the clock, or of the processors (``processor``)."""
        return sum(step[what] for step in self.timed) / sum(step[of] for step in self.timed)


class Contest:
    """Everything a run needs.

    Args:
        folder: for jobs, results and logs.
        pythons: the Python of each peer by its package.
        states: folder of states by who reads it: ``headstart`` (a cache root) and the peers that read some.
        threads: of each process.
    """

    def __init__(
        self, handover: Handover, folder: Path, pythons: dict[str, Path], states: dict[str, Path], threads: int
    ) -> None:
        self.handover, self.folder, self.pythons, self.states, self.threads = handover, folder, pythons, states, threads
        self.count = 0
        heads = handover.heads
        ids = torch.arange(handover.target.vocab_size) if heads.draft_ids is None else heads.draft_ids
        self.wanted = described(
            heads,
            taps=heads.config.taps,
            lookahead=heads.config.lookahead,
            draft_ids=ids,
            precision=handover.config.train.precision,
        )

    @property
    def cache(self) -> CacheSpec:
        """Our own states of these conversations."""
        dtype = getattr(torch, self.handover.config.data.feature_dtype)
        taps = tuple(self.handover.heads.config.taps)
        return CacheSpec(self.handover.target, self.handover.conversations, taps, dtype)

    def plan(self, batch: int) -> list[list[int]]:
        """Steps of about ``batch`` tokens over every conversation once, in the order that our training takes them."""
        settings = self.handover.config.train
        return plan_epoch(self.handover.conversations.lengths, batch, settings.bucket, settings.seed, 0)

    def run(
        self, contender: Contender, batch: int, steps: list[list[int]], *, keep: bool = False, lr: float | None = None,
        extra: dict[str, Any] | None = None,
    ) -> Run:  # fmt: skip
        """Train these steps in a process of its own.

        Raises:
            RunFailed: it ended with an error.
            ValueError: it trained other data or other heads than it was given.
        """
        self.count += 1
        out = self.folder / f"{self.count:03d}-{contender.name.replace(', ', '-')}-{batch}"
        out.mkdir(parents=True)
        job = self._job(contender, batch, steps, out, keep, lr)
        job.extra.update(extra or {})
        job.write(out / "job.json")
        command, environ = self._command(contender, out / "job.json")
        process = meter.run(command, environ, out / "log.txt")
        result = json.loads((out / RESULT).read_text(encoding="utf-8"))
        self._check(contender, steps, result)
        return Run(contender, batch, process, result, out)

    def _job(
        self, contender: Contender, batch: int, steps: list[list[int]], out: Path, keep: bool, lr: float | None
    ) -> Job:
        config, peer = self.handover.config, contender.peer
        reader = "headstart" if peer is None else peer.package if peer.reads_states else ""
        return Job(
            handover=str(self.handover.folder.resolve()),
            states=str(self.states[reader].resolve()) if reader in self.states else "",
            out=str(out.resolve()),
            steps=steps,
            precision=config.train.precision,
            optimizer=optimizer_of(config, lr),
            seed=config.train.seed,
            threads=self.threads,
            keep=keep,
            extra={"settings": _settings(contender, batch, steps, out)} if peer is None else {},
        )

    def _command(self, contender: Contender, job: Path) -> tuple[list[str], dict[str, str]]:
        """Ours is run as part of this project; a peer's Python sees of it the folder of this file alone."""
        peer = contender.peer
        python = Path(sys.executable) if peer is None else self.pythons[peer.package]
        module, path = ("train.peers.ours", HERE.parents[1]) if peer is None else (peer.module, HERE)
        return [str(python), "-m", module, str(job)], environment(path, self.threads)

    def _check(self, contender: Contender, steps: Sequence[Sequence[int]], result: dict[str, Any]) -> None:
        texts = self.handover.conversations
        given = digest([(texts.ids(i), texts.loss_mask(i)) for i in step] for step in steps)
        if result["data"] != given or len(result["steps"]) != len(steps):
            raise ValueError(f"{contender.name} did not train the {len(steps)} steps that it was given")
        if different := [name for name, value in self.wanted.items() if value != result["made"][name]]:
            told = "; ".join(f"{name} {result['made'][name]} where {self.wanted[name]} was asked" for name in different)
            raise ValueError(f"{contender.name} trained other heads than it was asked for: {told}")


def environment(path: Path, threads: int) -> dict[str, str]:
    """Variables of a process that sees ``path`` alone of this project, and no network."""
    found = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "PYTHON"))}
    found |= {
        "PYTHONPATH": str(path),
        "PYTHONSAFEPATH": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return found | {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}


def optimizer_of(config: RunConfig, lr: float | None) -> dict[str, Any]:
    """The recipe's optimizer as every trainer is told of it, at another learning rate if one is given."""
    settings = config.train
    names = ("lr", "warmup_steps", "schedule", "final_lr", "weight_decay", "beta1", "beta2", "clip")
    found = {name: getattr(settings, name) for name in names}
    return found if lr is None else found | {"lr": lr}


def _settings(contender: Contender, batch: int, steps: Sequence[object], out: Path) -> list[str]:
    values = {
        "data.features": contender.features,
        "train.batch_tokens": 2 * batch,
        "train.micro_tokens": 2 * batch,  # a step is never cut into several passes: that would only cost
        "train.max_steps": len(steps),
        "train.log_every": 10,
        "tracker.kind": "none",
        "output.folder": out / "run",
    }
    return [f"--{name}={value}" for name, value in values.items()]
