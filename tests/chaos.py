"""Fifty kills (SIGKILL) of a small run as it prepares, builds states and trains: what comes out is as if none had been.

    python tests/chaos.py --kills 50
    python tests/chaos.py --kills 10 --processes 2

A life is a process that does the whole job, from wherever earlier lives left it: conversations are prepared, the
target's states built, heads trained. Most lives are killed, at a time drawn from the wall clock behind the moment at
which they came to a stage; then the next one goes on. When a life comes through, its run is held against one that
nothing happened to: the same files and no other ones, the same weights, optimizer, log and report to the last bit.
Every life that goes on is also asked whether its log was cut to the step that it goes on from.

Lives are forked from one process that has imported everything, or most of their time would be that of imports. With
``--processes`` each is a launcher with so many ranks, of which one is killed (:mod:`tests.chaos_ranks`).
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script, from wherever
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

import data.prepare
from tests.data.toys import tokenizer
from tests.train.compare import same
from tests.train.world import log_of, write_world
from train import cache_build, cache_spec, shards, train_heads
from train.checkpoint import Checkpoints
from train.loop import Trainer
from train.step import Stepper

STAGES = ("starting", "preparing", "building states", "writing states", "accumulating", "between steps", "saving",
          "finishing")  # fmt: skip
INSIDE = {"accumulating", "saving"}
# what a kill waits for, in this order again and again: each run is killed so often before one of its lives may end
WAITS = [("preparing",), ("preparing",), ("building states", "writing states"), ("building states", "writing states"),
         ("accumulating",), ("saving",), ("accumulating",), ("saving",), ("accumulating",), STAGES]  # fmt: skip
CHUNK = 8  # conversations prepared together
PATIENCE = 120.0  # seconds without a sign of life


@dataclass
class Chaos:
    """Kills in one folder.

    Attributes:
        steps: of each training.
        late: fewest and most steps that a life begins before it may be killed inside one or a save.
        killed: stage → kills in it.
        runs: that came through, and were compared.
        lives: processes started.
    """

    folder: Path
    steps: int
    conversations: int
    dice: random.Random
    late: tuple[int, int] = (1, 5)
    killed: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    lives: int = 0

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        self.stage = mmap.mmap(-1, 64)  # shared with the lives: the stage, and steps that this life has begun
        self.recipe = write_world(self.folder, conversations=self.conversations)

    # a life

    def _live(self, run: Path) -> None:
        """The whole job, in this process."""
        self._watched()
        source, prepared = self.folder / "train.jsonl", run / "data"
        self._enter("preparing")
        data.prepare.prepare([source], tokenizer(), prepared, chunk=CHUNK, processes=1)
        self._enter("starting")
        train_heads.train(self._arguments(run, prepared))

    def _watched(self) -> None:
        """Have this process tell its stages, and look at its log when it goes on."""
        os.environ["ACCELERATE_USE_CPU"] = "true"  # a GPU cannot be used behind a fork
        own_bars()
        for owner, name, stage, after in _stations():
            setattr(owner, name, self._marked(getattr(owner, name), stage, after))
        original = Trainer.resume

        def resume(trainer: Trainer) -> None:
            original(trainer)
            if trainer.ranks.main and trainer.log.path.is_file():
                late = [line["step"] for line in log_of(trainer.folder) if line["step"] > trainer.progress.step]
                if late:
                    raise AssertionError(f"the log has steps {late} where the run goes on from {trainer.progress.step}")

        Trainer.resume = resume  # type: ignore[method-assign, assignment]
        cache_spec.SHARD_BYTES = (20_000, 1 << 30)

    def _arguments(self, run: Path, source: Path) -> list[str]:
        """Of train_heads."""
        chosen = {
            "data.train": source,
            "data.cache_folder": run / "cache",
            "output.folder": run / "run",
            "train.max_steps": self.steps,
            "train.epochs": 100,
            "train.micro_tokens": 40,
            "train.save_every": 2,
            "train.log_every": 1,
            "eval.prompts": 1,
            "eval.tokens": 2,
            "output.keep": 2,
        }
        settings = [word for name, value in chosen.items() for word in (f"--{name}", str(value))]
        return ["--config", str(self.recipe), *settings]

    def _enter(self, stage: str) -> None:
        self.stage[1] += stage == "accumulating"
        self.stage[0] = STAGES.index(stage)

    def _marked(self, function: Callable[..., Any], stage: str, after: str) -> Callable[..., Any]:
        def marked(*arguments: Any, **options: Any) -> Any:
            self._enter(stage)
            try:
                return function(*arguments, **options)
            finally:
                self._enter(after)

        return marked

    def _born(self, run: Path) -> int:
        """Start a life; its process id."""
        self.lives += 1
        self.stage[1] = 0
        self._enter("starting")
        sys.stdout.flush()
        child = os.fork()
        if child:
            with contextlib.suppress(OSError):
                os.setpgid(child, child)  # whoever of the two comes first
            return child
        status = 1
        try:
            with contextlib.suppress(OSError):
                os.setpgid(0, 0)
            with (run / "said.txt").open("a") as file:
                sys.stdout = sys.stderr = file
                for number in (1, 2):
                    os.dup2(file.fileno(), number)
                self._live(run)
            status = 0
        except BaseException:
            (run / "said.txt").open("a").write(traceback.format_exc())
        os._exit(status)

    # and its end

    def _kill(self, run: Path, wanted: tuple[str, ...]) -> bool:
        """Start a life and kill it some time after it came to a stage; whether it was still alive."""
        steps = self.dice.randint(*self.late) if INSIDE & set(wanted) and wanted is not STAGES else 0
        child, began = self._born(run), time.monotonic()
        while STAGES[self.stage[0]] not in wanted or self.stage[1] < steps:
            if self._ended(child, run):
                return False
            if time.monotonic() - began > PATIENCE:
                raise AssertionError(f"a life is stuck while {STAGES[self.stage[0]]}: see {run / 'said.txt'}")
            time.sleep(0.0005)
        # a short time for a stage, a long one where any will do
        time.sleep(self.dice.uniform(0, 4.0 if wanted is STAGES else 0.03))
        if self._ended(child, run):
            return False
        self.killed[STAGES[self.stage[0]]] += 1
        self._end(child, run)
        return True

    def _end(self, child: int, run: Path) -> None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)

    def _ended(self, child: int, run: Path) -> bool:
        gone, status = os.waitpid(child, os.WNOHANG)
        if gone and status:
            raise AssertionError(f"a life ended with status {os.waitstatus_to_exitcode(status)}: {_tail(run)}")
        return bool(gone)

    def _whole(self, run: Path) -> None:
        """A life that nobody kills."""
        child = self._born(run)
        _, status = os.waitpid(child, 0)
        if status:
            raise AssertionError(f"a life ended with status {os.waitstatus_to_exitcode(status)}: {_tail(run)}")

    def go(self, kills: int, waits: Sequence[tuple[str, ...]] = WAITS, say: Callable[[str], None] = print) -> None:
        """Kill so often, and hold every run that came through against the one that was left alone.

        Args:
            waits: the stages that the kills of a run wait for.

        Raises:
            AssertionError: they differ, or a life ended by itself with an error.
        """
        run, reference = self.folder / "run", self.folder / "reference"
        run.mkdir()
        self._whole(run)
        run.rename(reference)  # so that settings name the same places
        while sum(self.killed.values()) < kills:
            run.mkdir()
            for wanted in waits:
                if sum(self.killed.values()) == kills or not self._kill(run, wanted):
                    break
            self._whole(run)
            same(reference / "run", run / "run")
            ours, theirs = self._files(run), self._files(reference)
            if ours != theirs:
                raise AssertionError(f"left over: {sorted(ours - theirs)}; missing: {sorted(theirs - ours)}")
            self.runs += 1
            say(f"run {self.runs}: {sum(self.killed.values())} kills, equal to the run without")
            shutil.rmtree(run)

    def _files(self, run: Path) -> set[str]:
        """Every file but what lives said; caches are named by what is in them."""
        return {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()} - {"said.txt"}


def own_bars() -> None:
    """A lock for progress bars that no other process shares: one that is killed with it would hold up all others.

    Every kind of bar may have made a lock before, which it then has instead of its parent's.
    """
    kinds, lock = [tqdm], threading.RLock()
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
        kind.set_lock(lock)


def _stations() -> list[tuple[Any, str, str, str]]:
    """Owner and name of a function, the stage that it is, and the one behind it."""
    return [
        (cache_build, "compute", "building states", "starting"),
        (shards, "write", "writing states", "building states"),
        (Stepper, "run", "accumulating", "between steps"),
        (Checkpoints, "save", "saving", "between steps"),
        (train_heads, "finish", "finishing", "finishing"),
    ]


def _tail(run: Path) -> str:
    return (run / "said.txt").read_text()[-1500:]


def main() -> int:
    """Kill, print where, and 0 when every run was as if nothing had happened."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=12, help="of each training (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=1, help="that train together (default: %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headstart-chaos-") as folder:
        dice = random.Random(time.time_ns())
        if args.processes == 1:
            chaos = Chaos(Path(folder), args.steps, 160, dice)
            chaos.go(args.kills)
        else:
            from tests.chaos_ranks import ChaosOfRanks

            chaos = ranks = ChaosOfRanks(Path(folder), args.steps, 160, dice, processes=args.processes)
            chaos.go(args.kills, ChaosOfRanks.waits)
            print(", ".join(f"{name} {count} times" for name, count in sorted(ranks.victims.items())))
    inside = sum(chaos.killed[stage] for stage in INSIDE)
    print(f"{sum(chaos.killed.values())} kills in {chaos.lives} lives, {inside} inside accumulation or a save:")
    for stage, count in chaos.killed.most_common():
        print(f"  {count:4d}  {stage}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
