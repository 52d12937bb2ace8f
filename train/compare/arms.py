"""The arms of a comparison: where each one's heads come from, and how they were made.

==========================  ========================================================================================
``NAME=recipe:FILE``        our training with a recipe of any kind
``NAME=peer:PACKAGE``       another project's EAGLE-3 (``train/peers``); ``lr=RATE`` and ``optimizer=muon`` may follow
``NAME=heads:FOLDER``       heads that are there already
==========================  ========================================================================================

Behind ``@`` stand settings over the recipe's, apart by commas: ``deep=recipe:quickstart.yaml@heads.lookahead=5``.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from heads.config import nearest
from train.assemble import find_recipe
from train.compare.states import prepared
from train.config import RunConfig
from train.output import HEADS, REPORT
from train.peers import meter, teach
from train.peers.environments import PEERS, python_of
from train.peers.inside.job import write_json
from train.progress import Reporter
from train.settings import build, load, override, to_dict

SCRIPT = Path(__file__).resolve().parents[1] / "train_heads.py"
SPENT = "spent.json"  # what a training took
GRACE = 60.0  # seconds in which a training that is stopped writes its checkpoint


@dataclass(frozen=True)
class Arm:
    """One entry of a comparison; ``source`` is a row of ``SOURCES``."""

    name: str
    source: str
    what: str
    settings: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> Arm:
        """What stands behind ``--arm``.

        Raises:
            ValueError: it is written otherwise than this module says.
        """
        name, equals, rest = text.partition("=")
        source, colon, rest = rest.partition(":")
        what, _, settings = rest.partition("@")
        if not (name and equals and colon and what):
            raise ValueError(f"--arm {text}: write NAME=SOURCE:WHAT, as in ours=recipe:quickstart.yaml")
        if source not in SOURCES:
            raise ValueError(f"--arm {text}: heads come from {', '.join(SOURCES)}{nearest(source, SOURCES)}")
        pairs = [word.partition("=") for word in settings.split(",") if word]
        if bad := [key for key, sign, value in pairs if not (sign and value)]:
            raise ValueError(f"--arm {text}: {', '.join(bad)} has no value behind it")
        return cls(name, source, what, {key: value for key, _, value in pairs})


@dataclass(frozen=True)
class Course:
    """What all arms that are trained have in common.

    Attributes:
        base: the recipe that says data, target, batches, order and seed for all.
        steps: optimizer steps, so that all see the same tokens.
        folder: for what is trained; an arm that is there already is not trained again.
        environments: of the peers; ``pythons`` are made by the user.
        said: how a command line of the peers' script says the base recipe.
    """

    base: RunConfig
    accelerator: Accelerator
    steps: int
    folder: Path
    environments: Path
    pythons: dict[str, Path]
    threads: int
    reporter: Reporter
    said: tuple[str, ...] = ()

    def common(self) -> list[str]:
        """The settings that no recipe may choose for itself."""
        train, data, target = self.base.train, self.base.data, self.base.target
        values = {
            "data.train": data.train,
            "data.heldout": data.heldout,
            "data.max_length": data.max_length,
            "target.name": target.name,
            "target.dtype": target.dtype,
            "train.max_steps": self.steps,
            "train.batch_tokens": train.batch_tokens,
            "train.bucket": train.bucket,
            "train.seed": train.seed,
            "data.cache_folder": self.folder / "states",
        }
        return [f"--{name}={value}" for name, value in values.items()]


@dataclass(frozen=True)
class Taught:
    """An arm's heads.

    Attributes:
        heads: folder.
        steps, tokens: of the training; None where the heads were there already.
        seconds, peak_bytes: of it, start included; None also where a kill kept them from being known.
        states: seconds in which the target's states were computed before it; None where that is not known.
        fixed: seconds of the training that do not grow with its steps: the start.
        curve: (step, loss, accuracy by depth) as the trainer itself counts them.
        command: that made them.
    """

    heads: Path
    steps: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    states: float | None = None
    fixed: float = 0.0
    peak_bytes: int | None = None
    curve: tuple[tuple[int, float, tuple[float, ...]], ...] = ()
    command: str = ""
    versions: dict[str, str] = field(default_factory=dict)


def taught(arm: Arm, course: Course) -> Taught:
    """The heads of an arm, trained if they must be.

    Raises:
        ValueError, OSError: a bad setting, or a training that failed.
    """
    return SOURCES[arm.source](arm, course)


def _folder(arm: Arm, course: Course) -> Path:
    plain = "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in arm.name)
    return course.folder / f"{plain}-{course.steps}"


def _here(arm: Arm, course: Course) -> Taught:
    folder = Path(arm.what)
    return Taught(folder / HEADS if (folder / HEADS).is_dir() else folder)


def _ours(arm: Arm, course: Course) -> Taught:
    out = _folder(arm, course)
    quiet = {"eval.every": 0, "eval.conversations": 0, "eval.prompts": 0, "tracker.kind": "none", "output.folder": out}
    words = [f"--{name}={value}" for name, value in {**arm.settings, **quiet}.items()]
    words = ["--config", str(find_recipe(arm.what)), *words, *course.common()]
    config = load(Path(words[1]), words[2:])  # a bad setting is told before anything runs
    lengths, states = prepared(config, course.accelerator, course.reporter)
    course.reporter.say(f"{arm.name}: {course.steps} steps of {config.heads.kind} heads")
    out.mkdir(parents=True, exist_ok=True)
    spent = _metered([sys.executable, str(SCRIPT), *words], out, course.threads)
    report = json.loads((out / REPORT).read_text(encoding="utf-8"))
    return Taught(
        heads=out / HEADS,
        steps=report["steps"],
        tokens=sum(int(lengths[step].sum()) for step in teach.steps_of(config, lengths, report["steps"])),
        seconds=spent["seconds"],
        states=states,
        fixed=spent["fixed"],
        peak_bytes=spent["peak"],
        curve=tuple(_curve(out / "log.jsonl")),
        command=shlex.join(["python", "train/train_heads.py", "--config", arm.what, *words[2:]]),
        versions=report["versions"],
    )


def _metered(command: list[str], out: Path, threads: int) -> dict[str, Any]:
    """Run our training; what it took is kept beside it, with what it took before it was stopped.

    One that is found again finished takes nothing. After a kill, which nothing can note, what it took is None.
    """
    kept, finished = out / SPENT, (out / REPORT).is_file()
    environ = dict(os.environ) | {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    unknown: dict[str, Any] = {"seconds": None, "peak": None, "fixed": 0.0}
    before: dict[str, Any] = unknown if finished else {"seconds": 0.0, "peak": 0, "fixed": 0.0}
    if kept.is_file():
        before = dict(json.loads(kept.read_text(encoding="utf-8")))
    if finished:
        meter.run(command, environ, out / "log.txt")
        return before
    write_json(kept, unknown)  # which a kill would leave
    began = time.perf_counter()
    try:
        spent = meter.run(command, environ, out / "log.txt", grace=GRACE)
    except BaseException:
        if before["seconds"] is not None:
            write_json(kept, before | {"seconds": before["seconds"] + time.perf_counter() - began})
        raise
    if before["seconds"] is None:
        return unknown
    steps = json.loads((out / REPORT).read_text(encoding="utf-8"))["seconds"]
    whole = {"seconds": before["seconds"] + spent.seconds, "peak": max(before["peak"], spent.peak)}
    write_json(kept, whole | {"fixed": max(0.0, spent.seconds - steps)})
    return dict(json.loads(kept.read_text(encoding="utf-8")))


def _curve(path: Path) -> list[tuple[int, float, tuple[float, ...]]]:
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        told = json.loads(line)
        if "train/loss" in told:
            depths = [told[key] for depth in range(1, 65) if (key := f"train/acceptance/{depth}") in told]
            found.append((told["step"], told["train/loss"], tuple(depths)))
    return found


def _peer(arm: Arm, course: Course) -> Taught:
    if arm.what not in PEERS:
        raise ValueError(f"arm {arm.name}: peers are {', '.join(PEERS)}, not {arm.what}")
    peer, settings = PEERS[arm.what], dict(arm.settings)
    lr, optimizer = float(settings.pop("lr", course.base.train.lr)), settings.pop("optimizer", None)
    if optimizer not in (None, "muon") or (optimizer and peer.package != "speculators"):
        raise ValueError(f"arm {arm.name}: optimizer may be muon, with speculators; else it is AdamW")
    out, config = _folder(arm, course), load_over(course, settings)
    extra = {"optimizer": optimizer} if optimizer else {}
    if not (out / "report.json").is_file():
        python = course.pythons.get(peer.package) or python_of(peer, course.environments, course.reporter.say)
        lesson = teach.Lesson(peer, config, course.steps, lr, course.folder / "work", python, course.threads, extra)
        teach.teach(lesson, out, course.reporter)
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    if report.get("asked") != teach.asked(config, course.steps, lr, extra):
        raise ValueError(f"{out} holds heads that were trained otherwise: name another --runs, or remove it")
    lines = [json.loads(line) for line in (out / "curve.jsonl").read_text(encoding="utf-8").splitlines()]
    said = ["python", "train/peers/teach.py", arm.what, *course.said, "--steps", str(course.steps), "--lr", f"{lr:g}"]
    said += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    said += [part for word in course.common() for part in ("--set", word.removeprefix("--"))]
    return Taught(
        heads=out / HEADS,
        steps=report["steps"],
        tokens=report["tokens"],
        seconds=report["process_seconds"],
        states=report["states_seconds"],
        fixed=report["process_seconds"] - report["seconds"],
        peak_bytes=report["peak_bytes"],
        curve=tuple((line["step"], line["loss"], tuple(line["accuracy"])) for line in lines),
        command=shlex.join([*said, *(["--muon"] if optimizer else []), "--out", str(out)]),
        versions=report["versions"],
    )


def load_over(course: Course, settings: dict[str, str]) -> RunConfig:
    """The base recipe with an arm's settings, the common ones last."""
    plain = to_dict(course.base).items()
    sections = {section: {key: _text(value) for key, value in values.items()} for section, values in plain}
    override(sections, [*(f"--{key}={value}" for key, value in settings.items()), *course.common()])
    return build(sections, "the comparison's recipe")


def _text(value: Any) -> Any:
    """A setting as a recipe's YAML would have it."""
    if isinstance(value, dict):
        return {key: _text(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_text(item) for item in value]
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


SOURCES: dict[str, Callable[[Arm, Course], Taught]] = {"recipe": _ours, "peer": _peer, "heads": _here}
