"""The verbs ``train``, ``quickstart``, ``train-speed`` and ``losses``.

On several processes training is launched instead: ``accelerate launch train/train_heads.py``.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from typing import Any

from train.assemble import find_recipe
from train.progress import Reporter
from train.settings import load
from train.speed import measure
from train.speed_packing import measure_packing


def _train_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = "headstart train [--config RECIPE] [--dry-run] [--json FILE] [--SECTION.KEY VALUE ...]"
    parser.add_argument("--config", default="quickstart.yaml", metavar="RECIPE", help="(default: %(default)s)")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="train nothing: print the effective settings, parameter counts, steps, and the memory and disk it needs",
    )
    parser.epilog = (
        f"{parser.epilog}\n\n--SECTION.KEY VALUE sets one of the recipe's settings, as in --train.lr 3e-4; "
        "`python train/train_heads.py --help` lists them"
    )
    parser.set_defaults(takes_settings=True)


def _train(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """In this process, as ``train/train_heads.py`` does it."""
    from train.dry_run import dry_run
    from train.interrupt import terminate
    from train.train_heads import train

    if args.json is not None:
        args.json = args.json.absolute()
    signal.signal(signal.SIGTERM, terminate)
    words = ["--config", args.config, *args.settings]
    if args.dry_run:
        return dry_run(words)
    report = train(words)
    if int(os.environ.get("RANK", "0")):
        return report, ""
    decoded = report.get("decoded") or {}
    tau = f", {decoded['tokens_per_round']:.2f} tokens per round on held-out prompts" if decoded else ""
    return report, f"{report['steps']} steps{tau}; the heads and report.json are in the run folder"


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default="quickstart.yaml", help="recipe (default: %(default)s)")
    parser.add_argument("--conversations", type=int, default=120, help="how many to train on (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=4, help="passes over them each way (default: %(default)s)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="a setting over the recipe's; repeatable",
    )
    parser.add_argument("--packing", action="store_true", help="packed against padded rows, states as the recipe says")


def _run(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    config = load(find_recipe(args.config), [f"--{word}" for word in args.set])
    if args.conversations < 1 or args.epochs < 1:
        raise ValueError("--conversations and --epochs must be 1 or more")
    if args.packing:
        speed = measure_packing(config, args.conversations, args.epochs, Reporter(True))
        return speed.to_dict(), speed.to_text()
    found = measure(config, args.conversations, args.epochs, Reporter(True)).to_dict()
    return found, "\n".join(
        (
            f"{found['epochs']} epochs of {found['tokens_per_epoch']:,} tokens each way",
            f"  online   {found['online_tokens_per_second']:8,.0f} tokens/s   {found['online_seconds']:8.1f} s",
            f"  cached   {found['cached_tokens_per_second']:8,.0f} tokens/s   "
            f"{found['cached_seconds_with_build']:8.1f} s with {found['build_seconds']:.1f} s of building",
            f"  ratio    {found['ratio']:.2f} in tokens/s; {found['ratio_with_build']:.2f} with the building in",
        )
    )


def _quickstart_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="runs/quickstart", metavar="FOLDER", help="(default: %(default)s)")


def _quickstart(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """It says what it does while it does it; greedy text that differs from the target's is an answer of no."""
    from train.quickstart import quickstart

    summary = quickstart(args.out)
    return {"ok": summary["greedy_identical"]} | summary, ""


def _losses_options(parser: argparse.ArgumentParser) -> None:
    from train.loss_table import LOSSES

    parser.add_argument("--config", default="quickstart.yaml", help="recipe (default: %(default)s)")
    parser.add_argument(
        "--loss",
        action="append",
        metavar="NAME[=WEIGHT,…]",
        help=f"a loss to train with; repeatable (default: each of {', '.join(LOSSES)})",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps of each (default: the recipe's)")
    parser.add_argument("--out", default="runs/losses", metavar="FOLDER", help="(default: %(default)s)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="a setting over the recipe's; repeatable",
    )


def _losses(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from train.loss_table import LOSSES, compare, to_dict, to_text

    words = [*args.set, f"output.folder={args.out}", *([] if args.steps is None else [f"train.max_steps={args.steps}"])]
    config = load(find_recipe(args.config), [f"--{word}" for word in words])
    rows = compare(config, args.loss or LOSSES, Reporter(True))
    return to_dict(config, rows), to_text(rows)


def _compare_options(parser: argparse.ArgumentParser) -> None:
    from train.compare.verb import configure

    configure(parser)


def _compare(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from train.compare.verb import run

    return run(args)


def register(add: Callable[..., None]) -> None:
    """Add the verbs to the command line."""
    add(
        "train",
        help="train heads in this process, or show what that would take",
        example="headstart train --config configs/long.yaml --output.folder runs/mine --dry-run",
        configure=_train_options,
        run=_train,
    )
    add(
        "quickstart",
        help="train heads for the embedded target, measure them, show a generated answer",
        example="headstart quickstart",
        configure=_quickstart_options,
        run=_quickstart,
    )
    add(
        "train-speed",
        help="training speed with cached and with online states of the target",
        example="headstart train-speed --conversations 120 --json speed.json",
        configure=_options,
        run=_run,
    )
    add(
        "losses",
        help="what each loss is worth: one recipe trained once for each, and what is accepted afterwards",
        example="headstart losses --loss soft_ce --loss lk_mixed --steps 120",
        configure=_losses_options,
        run=_losses,
    )
    add(
        "compare",
        help="train or take several heads, other projects' too, and measure all of them on the same prompts",
        example="headstart compare --arm ours=recipe:quickstart.yaml --arm theirs=peer:economize@lr=1e-3 "
        "--out docs/results/quickstart",
        configure=_compare_options,
        run=_compare,
    )
