"""Trains one recipe again and again with one thing changed, and says what each change was worth.

python -m train.compare.ablations --plan configs/compare/ablations.yaml --out docs/results/ablations

What was trained and decoded is found again, so a stopped run goes on. The folder gets README.md (a table for each
question), ablations.png and report.json.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from heads.formats.folder import new_folder
from heads.target import Target
from infer.evaluate import Settings, ask
from infer.options import DTYPES, positive, prompt_options, prompts_of
from infer.plot import drawable
from train.assemble import BUILTIN, find_recipe, load_conversations
from train.compare.ablation_page import draw, page, results, tables
from train.compare.ablation_plan import Ablations, Group, Run, read, some
from train.compare.arms import Arm, Course, Taught, taught
from train.compare.judge import Judge
from train.compare.score import Plan, Score
from train.compare.starts import written
from train.evaluation import spread
from train.files import write_whole
from train.launch import start
from train.peers.environments import default_root
from train.peers.inside.job import write_json
from train.progress import Reporter
from train.ranks import Ranks
from train.settings import load, to_yaml
from train.targets import load_target

TRIAL, DEPTH = 8, 7


@dataclass
class Trainings:
    """Trains runs, each once.

    Attributes:
        course: what all have in common.
        minutes: of a run; its steps are measured.
        steps: of a run, instead.
        data: other conversations, by name.
    """

    course: Course
    plan: Ablations
    minutes: float
    steps: int | None
    data: dict[str, Path]
    done: dict[str, Taught] = field(default_factory=dict)

    def course_of(self, run: Run) -> Course:
        """With the run's own data."""
        base = self.course.base
        if run.data is not None:
            base = replace(base, data=replace(base.data, train=str(self.data[run.data])))
        if run.conversations is not None:
            part = fewer(base.data.train, run.conversations, self.course.folder / "data")
            base = replace(base, data=replace(base.data, train=str(part)))
        return replace(self.course, base=base)

    def __call__(self, run: Run) -> Taught:
        """The run's heads."""
        course = self.course_of(run)
        length = self.steps or [self.plan.equal, self.minutes]
        about = json.dumps([run.content, to_yaml(course.base), length], sort_keys=True)
        name = hashlib.sha256(about.encode()).hexdigest()[:10]
        if name in self.done:
            return self.done[name]
        settings = dict(run.set)
        if run.init is not None:
            settings["heads.init"] = str(self._start(run, course, name))
        arm = Arm(name, "recipe", run.recipe, settings)
        self.done[name] = taught(arm, replace(course, steps=self._steps(arm, course)))
        return self.done[name]

    def check(self, run: Run) -> None:
        """What can be told before hours of training: settings that there are not, data that cannot be had so.

        Raises:
            ValueError, OSError: the run cannot be trained.
        """
        course = self.course_of(run)
        load(find_recipe(run.recipe), [*(f"--{key}={value}" for key, value in run.set), *course.common()])

    def _start(self, run: Run, course: Course, name: str) -> Path:
        words = [f"--{key}={value}" for key, value in run.set] + course.common()
        words.append(f"--output.folder={course.folder / 'starts' / name}")
        config = load(find_recipe(run.recipe), words)
        target = load_target(config, course.accelerator)
        texts = load_conversations(config, "train", target, Ranks(), Reporter(False))
        assert run.init is not None
        return written(run.init, config, target, texts, course.folder / "starts" / name / "heads")

    def _steps(self, arm: Arm, course: Course) -> int:
        """Those that take the minutes, by a short trial of the recipe, or of the run where all are equally long."""
        if self.steps is not None:
            return self.steps
        if self.plan.equal == "tokens":
            arm = Arm("recipe", "recipe", self.plan.config)
            course = self.course
        about = json.dumps([arm.what, arm.settings, to_yaml(course.base), course.threads], sort_keys=True)
        settings = {**arm.settings, "train.log_every": "1"}
        name = f"{arm.name}-trial-{hashlib.sha256(about.encode()).hexdigest()[:10]}"
        kept = course.folder / f"{name}.json"
        if not kept.is_file():
            done = taught(replace(arm, name=name, settings=settings), replace(course, steps=TRIAL))
            write_json(kept, {"seconds_per_step": _seconds_per_step(done)})
        each = json.loads(kept.read_text(encoding="utf-8"))["seconds_per_step"]
        return max(1, round(60 * self.minutes / each))


def _seconds_per_step(trial: Taught) -> float:
    """By the middle of its steps: the first ones wait for memory and code."""
    assert trial.tokens is not None and trial.steps is not None
    lines = (trial.heads.parent / "log.jsonl").read_text(encoding="utf-8").splitlines()
    rates = [found for line in lines if (found := json.loads(line).get("train/tokens_per_second"))]
    return trial.tokens / trial.steps / median(rates)


def fewer(named: str, count: int, folder: Path) -> Path:
    """So many of some files' conversations, evenly spread over them, as a file of their own.

    Raises:
        ValueError: there are fewer, or it is a prepared folder.
        OSError: a file is not there.
    """
    sources = [BUILTIN.get(name, Path(name)) for name in named.split(" + ")]
    if any(source.is_dir() for source in sources):
        raise ValueError(f"data.train is {named}: fewer conversations are taken of files, not of a prepared folder")
    rows: list[str] = []
    for source in sources:
        stored = source.read_bytes()
        text = (gzip.decompress(stored) if source.suffix == ".gz" else stored).decode("utf-8")
        rows += [line for line in text.splitlines() if line.strip()]
    if count > len(rows):
        raise ValueError(f"{count} conversations are asked for, and {named} has {len(rows)}")
    text = "".join(f"{rows[at]}\n" for at in spread(len(rows), count))
    path = folder / f"{count}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.jsonl"
    if not path.is_file():
        write_whole(path, text)
    return path


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--plan", type=Path, required=True, metavar="FILE", help="which runs there are")
    add("--only", action="append", default=[], metavar="GROUP", help="this group, not all; repeatable")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, help="of training each (default: the plan's)")
    length.add_argument("--steps", type=positive, help="of training each, instead of a time")
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="a setting for all")
    add("--data", action="append", default=[], metavar="NAME=FILE", help="conversations that runs ask for by name")
    prompt_options(parser, 12)
    add("--seed", type=int, default=0, help="of decoding (default: %(default)s)")
    add("--dtype", choices=DTYPES, default="bfloat16", help="while decoding (default: %(default)s)")
    add("--threads", type=positive, default=torch.get_num_threads(), help="of each training (default: %(default)s)")
    add("--runs", type=Path, default=Path("runs/ablations"), help="what is made, found again (default: %(default)s)")
    add("--out", type=Path, required=True, metavar="FOLDER", help="a new folder")
    return parser


def run(args: argparse.Namespace, reporter: Reporter) -> dict[str, Any]:
    """Train and decode all that can be, write the folder; returns what report.json holds."""
    plan = some(read(args.plan), args.only)
    data = {name: Path(path) for name, _, path in (word.partition("=") for word in args.data)}
    base = load(find_recipe(plan.config), [f"--{word}" for word in args.set])
    minutes = plan.minutes if args.minutes is None else args.minutes
    prompts = prompts_of(args)
    drawable()
    with new_folder(args.out) as partial:
        course = Course(base, start(base), TRIAL, args.runs, default_root(), {}, args.threads, reporter)
        trainings = Trainings(course, plan, minutes, args.steps, data)
        target = Target.load(base.target.name, dtype=getattr(torch, args.dtype), device=course.accelerator.device)
        settings = Settings(args.max_new_tokens, 0.0, args.seed)
        judge = Judge(target, args.runs / "scores", DEPTH, Plan(settings, (), trees=(8, 16, 32)))
        questions = ask(prompts, target.tokenizer())
        needed = {group.name: _missing(group, data) for group in plan.groups}
        for group in plan.groups:
            for one in group.runs if not needed[group.name] else ():
                trainings.check(one)
        groups = []
        for group in plan.groups:
            missing = needed[group.name]
            found: list[tuple[Run, Taught, Score]] = []
            for one in group.runs if not missing else ():
                reporter.say(f"── {group.name}: {one.name}")
                done = trainings(one)
                found.append((one, done, judge.of_heads(one.name, done.heads, questions)))
            groups.append(results(group, found, missing))
        report = {
            "target": target.name,
            "dtype": args.dtype,
            "prompts": [one.id for one in questions],
            "max_new_tokens": args.max_new_tokens,
            "minutes": None if args.steps else minutes,
            "equal": plan.equal,
            "seed": base.train.seed,
            "command": shlex.join(["python", "-m", "train.compare.ablations", *sys.argv[1:]]),
            "groups": groups,
        }
        draw(report, partial / "ablations.png")
        write_json(partial / "report.json", report)
        write_whole(partial / "README.md", page(report))
    return report


def _missing(group: Group, data: Mapping[str, Path]) -> list[str]:
    """Names of conversations that its runs ask for and that are not given."""
    return sorted({one.data for one in group.runs if one.data is not None and one.data not in data})


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0 when the folder was written, 2 for an error."""
    try:
        report = run(options().parse_args(arguments), Reporter(True))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130
    print(tables(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
