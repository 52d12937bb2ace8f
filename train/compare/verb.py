"""The verb ``compare``: heads of several kinds, recipes and projects on one data set, one target, the same prompts."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from heads.formats.folder import new_folder
from heads.target import Target
from infer.evaluate import Question, Settings, ask
from infer.options import DTYPES, numbers, others, positive, prompt_options, prompts_of, sample, temperature
from infer.plot import drawable
from infer.prompts import Prompt, read_prompts
from train.assemble import find_recipe
from train.compare import own_engine
from train.compare.arms import Arm, Course, Taught
from train.compare.equal_time import longer
from train.compare.judge import Judge
from train.compare.page import block, page, tables
from train.compare.plots import draw
from train.compare.price import ceilings
from train.compare.rates import Try, choose, train_all
from train.compare.report import figures, held
from train.compare.score import DECODED, Plan, columns, controls, every_budget
from train.launch import start
from train.output import write_whole
from train.peers.environments import PEERS, default_root, python_of
from train.peers.inside.job import write_json
from train.progress import Reporter
from train.settings import load


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    add = parser.add_argument
    what = "recipe:FILE, peer:economize, peer:speculators or heads:FOLDER; the first is held against the others"
    add("--arm", action="append", required=True, metavar="NAME=SOURCE:WHAT[@KEY=VALUE,…]", help=what)
    add("--config", default="quickstart.yaml", help="whose data, target, batches and seed all share (%(default)s)")
    mine = "a setting over that recipe's; what is not of data, target, batches and seed is the peers' alone"
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=mine)
    add("--steps", type=positive, default=400, help="optimizer steps of each arm: equal tokens (default: %(default)s)")
    once = "train every arm once more, for S seconds, states and start included: equal time"
    add("--seconds", type=float, metavar="S", help=once)
    each = "learning rates, apart by commas: every arm that names none is trained at each and takes the best"
    add("--rates", type=numbers(float), default=[], metavar="LR,…", help=each)
    add(
        "--rate-prompts",
        type=positive,
        default=8,
        metavar="N",
        help="that choose it, kept apart (%(default)s)",
    )
    prompt_options(parser, 24)
    add("--sample", type=positive, metavar="N", help="also the first N of the held-out sample, before --prompts")
    add("--depth", type=positive, default=7, help="deepest draft (default: %(default)s)")
    add("--temperatures", type=numbers(temperature), default=[0.0, 1.0], metavar="T,…", help="(default: 0,1)")
    which = "budgets that are really decoded, of the figures that count (default: %(default)s)"
    add("--decoded", default=",".join(DECODED), metavar="BUDGET,…", help=which)
    real = "greedy decoding is real on N prompts, evenly spread, to check the walks that the figures are from (all)"
    add("--checked", type=positive, metavar="N", help=real)
    add("--seed", type=int, default=0, help="of sampling (default: %(default)s)")
    add("--control-prompts", type=positive, default=4, metavar="N", help="for the target as its own draft")
    least = "the first arm must have so many times the arm's accepted drafts a round, else the exit status is 1"
    add("--at-least", action="append", default=[], metavar="NAME=TIMES", help=least)
    add("--dtype", choices=DTYPES, default="bfloat16", help="of target and heads (default: %(default)s)")
    add("--runs", type=Path, default=Path("runs/compare"), help="what is made, found again (default: %(default)s)")
    add("--out", type=Path, required=True, metavar="FOLDER", help="a new folder for report, table and pictures")
    add("--threads", type=positive, default=torch.get_num_threads(), help="of each training (default: %(default)s)")
    add("--environments", type=Path, default=default_root(), help="where the peers' lie (default: %(default)s)")
    add("--python", action="append", default=[], metavar="PEER=PATH", help="a peer's Python, made by yourself")


def run(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Train or take every arm, measure all, write the folder."""
    arms = [Arm.read(text) for text in args.arm]
    if len({arm.name for arm in arms}) < len(arms):
        raise ValueError("two arms have one name: give each its own")
    drawable()
    wanted, decoded = _wanted(args.at_least, [arm.name for arm in arms]), _budgets(args.decoded)
    prompts, reporter = _prompts(args), Reporter(True)
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
            said=("--config", args.config, *(part for word in args.set for part in ("--set", word))),
        )
        tried = train_all(arms, args.rates, course)
        target = Target.load(base.target.name, dtype=getattr(torch, args.dtype), device=course.accelerator.device)
        settings = Settings(args.max_new_tokens, 0.0, args.seed)
        plan = Plan(settings, tuple(args.temperatures), args.checked, decoded=decoded)
        judge = Judge(target, args.runs / "scores", args.depth, plan)
        choosing = ask(others(prompts, args.rate_prompts), target.tokenizer()) if args.rates else []
        best, tried = choose(tried, lambda one: judge.worth(one.arm.name, one.done.heads, choosing))
        made = {name: one.done for name, one in best.items()} | (timed := longer(best, course, args.seconds))
        questions, apart = ask(prompts, target.tokenizer()), controls(target, args.depth, args.control_prompts)
        scores = {name: judge.of_heads(name, done.heads, questions) for name, done in made.items()}
        scores |= {name: judge.score(name, one, questions, {"control": name}) for name, one in apart.items()}
        own = _own_engines(best, made, course, target, questions, args)
        prices = {name: judge.price(done.heads, questions[0], decoded) for name, done in made.items()}
        counting = columns(args.temperatures, decoded)
        report = figures(scores, made, tried, list(timed), list(apart), counting) | _asked(args, questions, target)
        report["decoded"] = list(decoded)
        for name, found in own.items():
            report["arms"][name]["own_engine"] = found
        for name, one in prices.items():
            report["arms"][name]["price"] = one | {"speedup": ceilings(one, _taus(report, name))}
        report["train_seed"], report["at_least"] = base.train.seed, held(report, wanted)
        report["ok"] = all(all(one["met"].values()) for one in report["at_least"].values())
        shown = tables(report)
        report["pictures"] = draw(report, partial)
        write_json(partial / "report.json", report)
        write_whole(partial / "README.md", page(args.out.name, report, shown))
    return report, f"{shown}\n\nreport, tables and pictures: {args.out}"


def _budgets(text: str) -> tuple[str, ...]:
    names, known = tuple(word.strip() for word in text.split(",")), every_budget(1)
    if wrong := [name for name in names if name not in known]:
        raise ValueError(f"--decoded {', '.join(wrong)}: budgets are {', '.join(known)}")
    return names


def _taus(report: Mapping[str, Any], name: str) -> dict[str, float]:
    """Tokens per round by column."""
    arm = report["arms"][name]
    return {column: block(arm, column)["loop_free_tokens_per_round"]["value"] for column in report["columns"]}


def _wanted(texts: Sequence[str], names: Sequence[str]) -> dict[str, float]:
    found = {}
    for text in texts:
        name, _, times = text.partition("=")
        try:
            found[name] = float(times)
        except ValueError:
            raise ValueError(f"--at-least {text}: write NAME=TIMES, as in dflash=1.1") from None
        if name not in names[1:]:
            raise ValueError(f"--at-least {text}: the arms behind the first are {', '.join(names[1:]) or 'none'}")
    return found


def _prompts(args: argparse.Namespace) -> list[Prompt]:
    """Those of the sample are a category of their own where there are others."""
    found = prompts_of(args)
    if args.prompts is None or args.sample is None:
        return found
    mine = read_prompts(sample(), limit=args.sample)
    return [Prompt(f"sample {one.id}", "sample", one.messages) for one in mine] + found


def _own_engines(
    best: Mapping[str, Try],
    made: Mapping[str, Taught],
    course: Course,
    target: Target,
    questions: Sequence[Question],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Figures of peers' heads that their own engines decode, by arm."""
    found = {}
    for name, one in best.items():
        if one.arm.source != "peer" or one.arm.what not in own_engine.MODULES:
            continue
        peer, folder = PEERS[one.arm.what], made[name].heads.parent
        python = course.pythons.get(peer.package) or python_of(peer, course.environments, course.reporter.say)
        course.reporter.say(f"{name}: {len(questions)} prompts by {peer.package}'s own engine")
        found[name] = own_engine.decode(
            peer.package, python, folder / "checkpoint", target, questions, args.max_new_tokens, course.threads,
            folder / "own",
        )  # fmt: skip
    return found


def _asked(args: argparse.Namespace, questions: Sequence[Question], target: Target) -> dict[str, Any]:
    return {
        "target": target.name,
        "dtype": args.dtype,
        "prompts": [{"id": one.id, "category": one.category} for one in questions],
        "max_new_tokens": args.max_new_tokens,
        "seed": args.seed,
        "steps": args.steps,
        "seconds": args.seconds,
        "depth": args.depth,
        "checked": args.checked,
    }
