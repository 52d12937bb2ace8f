"""The verb ``compare``: heads of several kinds, recipes and projects on one data set, one target, the same prompts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from heads.base import DraftHeads
from heads.formats.folder import new_folder
from heads.target import Target
from infer.evaluate import Question, Settings, ask
from infer.options import DTYPES, positive, prompt_options, prompts_of
from train.assemble import find_recipe
from train.compare.arms import Arm, Course, Taught, again, taught
from train.compare.plots import draw
from train.compare.report import figures, table
from train.compare.score import Score, controls, of_heads, score
from train.launch import start
from train.output import write_whole
from train.peers.environments import default_root
from train.peers.inside.job import write_json
from train.progress import Reporter
from train.settings import load


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    add = parser.add_argument
    what = "recipe:FILE, peer:economize, peer:speculators or heads:FOLDER; the first is held against the others"
    add("--arm", action="append", required=True, metavar="NAME=SOURCE:WHAT[@KEY=VALUE,…]", help=what)
    add("--config", default="quickstart.yaml", help="whose data, target, batches and seed all share (%(default)s)")
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="a setting over that recipe's")
    add("--steps", type=positive, default=400, help="optimizer steps of each arm: equal tokens (default: %(default)s)")
    add("--seconds", type=float, metavar="S", help="train every arm once more, as long as takes S seconds")
    prompt_options(parser, 24)
    add("--depth", type=positive, default=7, help="deepest draft (default: %(default)s)")
    add("--temperatures", default="0,1", help="really decoded at each (default: %(default)s)")
    add("--seed", type=int, default=0, help="of sampling (default: %(default)s)")
    add("--control-prompts", type=positive, default=4, metavar="N", help="for the target as its own draft")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of target and heads (default: %(default)s)")
    add("--runs", type=Path, default=Path("runs/compare"), help="what is trained, found again (default: %(default)s)")
    add("--out", type=Path, required=True, metavar="FOLDER", help="a new folder for report, table and pictures")
    add("--threads", type=positive, default=torch.get_num_threads(), help="of each training (default: %(default)s)")
    add("--environments", type=Path, default=default_root(), help="where the peers' lie (default: %(default)s)")
    add("--python", action="append", default=[], metavar="PEER=PATH", help="a peer's Python, made by yourself")


def run(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Train or take every arm, measure all, write the folder."""
    arms = [Arm.read(text) for text in args.arm]
    if len({arm.name for arm in arms}) < len(arms):
        raise ValueError("two arms have one name: give each its own")
    temperatures = _temperatures(args.temperatures)
    prompts, reporter = prompts_of(args), Reporter(True)
    base = load(find_recipe(args.config), [f"--{word}" for word in args.set])
    with new_folder(args.out) as partial:
        course = Course(
            base=base,
            accelerator=start(base),
            steps=args.steps,
            folder=args.runs,
            environments=args.environments,
            pythons={name: Path(path) for name, _, path in (word.partition("=") for word in args.python)},
            threads=args.threads,
            reporter=reporter,
        )
        made = _train(arms, course, args.seconds)
        target = Target.load(base.target.name, dtype=getattr(torch, args.dtype), device=course.accelerator.device)
        questions = ask(prompts, target.tokenizer())
        settings = Settings(args.max_new_tokens, 0.0, args.seed)
        scores = _scores(target, made, questions, settings, temperatures, args)
        apart = list(controls(target, args.depth, args.control_prompts))
        report = figures(scores, made, arms[0].name, apart) | _asked(args, questions, target)
        shown = table(report)
        report["pictures"] = draw(report, partial)
        write_json(partial / "report.json", report)
        pictures = "\n".join(f"![{name}]({name})" for name in report["pictures"])
        write_whole(partial / "README.md", f"# {args.out.name}\n\n{_words(report)}\n\n{shown}\n\n{pictures}\n")
    return report, f"{shown}\n\nreport, table and pictures: {args.out}"


def _temperatures(text: str) -> list[float]:
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 0:
        raise ValueError(f"--temperatures {text}: numbers of 0 or more, apart by commas, are wanted")
    return found


def _train(arms: list[Arm], course: Course, seconds: float | None) -> dict[str, Taught]:
    made = {arm.name: taught(arm, course) for arm in arms}
    if len({done.tokens for done in made.values() if done.tokens is not None}) > 1:
        seen = ", ".join(f"{name} {done.tokens}" for name, done in made.items())
        raise ValueError(f"the arms did not see equally many tokens: {seen}")
    if seconds is None:
        return made
    longer = [again(arm, made[arm.name], course, seconds) for arm in arms]
    return made | {arm.name: taught(arm, other) for arm, other in filter(None, longer)}


def _scores(
    target: Target,
    made: dict[str, Taught],
    questions: list[Question],
    settings: Settings,
    temperatures: list[float],
    args: argparse.Namespace,
) -> dict[str, Score]:
    found = {}
    for name, done in made.items():
        heads = DraftHeads.from_pretrained(done.heads, target)
        found[name] = score(target, of_heads(heads, args.depth), questions, settings, temperatures, name)
    for name, contestant in controls(target, args.depth, args.control_prompts).items():
        found[name] = score(target, contestant, questions, settings, temperatures, name)
    return found


def _asked(args: argparse.Namespace, questions: list[Question], target: Target) -> dict[str, Any]:
    return {
        "target": target.name,
        "dtype": args.dtype,
        "prompts": [{"id": one.id, "category": one.category} for one in questions],
        "max_new_tokens": args.max_new_tokens,
        "seed": args.seed,
        "steps": args.steps,
        "seconds": args.seconds,
    }


def _words(report: dict[str, Any]) -> str:
    lines = [
        f"Target {report['target']} in {report['dtype']}; {len(report['prompts'])} held-out prompts, "
        f"{report['max_new_tokens']} tokens each; {report['machine']}.",
        f"Seed {report['seed']}; {', '.join(f'{name} {value}' for name, value in report['versions'].items())}.",
        "",
        "```",
        report["command"],
        *(arm["training"]["command"] for arm in report["arms"].values() if (arm.get("training") or {}).get("command")),
        "```",
    ]
    return "\n".join(lines)
