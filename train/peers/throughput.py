"""Tokens a second and peak memory of our training beside other projects', the same EAGLE-3 on the same data.

python train/peers/throughput.py --json throughput.json           all, the peers' environments made where missing
python train/peers/throughput.py --only economize --batch economize=1024 --batch headstart=2048
python train/peers/throughput.py --python economize=envs/e/bin/python --python speculators=envs/s/bin/python

Each trainer gets the same conversations in files, is tried at several batch sizes on some of them, and then trains all
of them once a round at its best, in turns with the others; each run is a fresh process. That it trained these
conversations and heads of that shape is checked. Wants a machine that does nothing else meanwhile.
"""

from __future__ import annotations

import sys
from pathlib import Path

# As a script its own folder stands first on the path, where its neighbours would shadow other modules.
_HERE = Path(__file__).resolve().parent
sys.path[:] = [str(_HERE.parents[1]), *(entry for entry in sys.path if Path(entry or ".").resolve() != _HERE)]

import argparse  # noqa: E402
import math  # noqa: E402
import os  # noqa: E402
import platform  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from dataclasses import replace  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402

from train.assemble import find_recipe  # noqa: E402
from train.cache import open_or_build  # noqa: E402
from train.config import RunConfig  # noqa: E402
from train.interrupt import Terminated, terminate  # noqa: E402
from train.peers.contest import CONTENDERS, WARM_UP, Contender, Contest, Run  # noqa: E402
from train.peers.environments import PEERS, default_root, python_of  # noqa: E402
from train.peers.figures import best, summarize, table, terms  # noqa: E402
from train.peers.handover import hand_over, write_states  # noqa: E402
from train.peers.inside.job import write_json  # noqa: E402
from train.progress import Reporter  # noqa: E402
from train.ranks import Ranks  # noqa: E402
from train.settings import load  # noqa: E402

# what all can train with: economize lacks EAGLE-3.1's norms, and Muon; and what all compute: one loss
COMMON = [
    "--heads.options.fc_norm=false", "--heads.options.norm_output=false", "--train.optimizer=adamw",
    "--train.loss={soft_ce: 1.0}",
]  # fmt: skip


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", default="quickstart.yaml", help="recipe of kind eagle (default: %(default)s)")
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="a setting over the recipe's")
    add("--conversations", type=int, default=120, help="that all train on (default: %(default)s)")
    add("--rounds", type=int, default=3, help="runs of each trainer, in turns (default: %(default)s)")
    add("--only", action="append", default=[], metavar="NAME", help="one trainer of these: " + ", ".join(names()))
    add("--batch", action="append", default=[], metavar="NAME=TOKENS", help="tokens of its steps, without trying")
    add("--trial-tokens", type=int, default=8192, help="trained to try a batch size (default: %(default)s)")
    add("--threads", type=int, default=torch.get_num_threads(), help="of each trainer (default: %(default)s)")
    add("--environments", type=Path, default=default_root(), help="where the peers' lie (default: %(default)s)")
    add("--python", action="append", default=[], metavar="NAME=PATH", help="a peer's Python, made by yourself")
    add("--work", type=Path, help="folder for what is handed over, kept afterwards (default: a temporary one)")
    add(
        "--at-least", type=float, metavar="RATIO", help="status 1 unless ours, cached, is so many times the better peer"
    )
    add("--json", type=Path, metavar="FILE", help="also write the report to FILE")
    return parser


def names() -> list[str]:
    """Trainers by the first word of their contenders."""
    return list(dict.fromkeys(contender.name.split(",")[0] for contender in CONTENDERS))


def pairs(words: Sequence[str], option: str) -> dict[str, str]:
    """NAME=VALUE by NAME.

    Raises:
        ValueError: no such trainer, or no value.
    """
    found = dict(word.partition("=")[::2] for word in words)
    for name, value in found.items():
        if name not in names() or not value:
            raise ValueError(f"{option} {name}={value}: NAME is one of {', '.join(names())}, and needs a value")
    return found


def measure(args: argparse.Namespace, reporter: Reporter) -> dict[str, Any]:
    """Everything; returns the report.

    Raises:
        ValueError: bad settings, or a trainer that trained something else.
        OSError: an environment or a run failed.
    """
    if min(args.conversations, args.rounds, args.threads, args.trial_tokens) < 1:
        raise ValueError("--conversations, --rounds, --threads and --trial-tokens must be 1 or more")
    fixed = {name: int(tokens) for name, tokens in pairs(args.batch, "--batch").items()}
    chosen = [one for one in CONTENDERS if not args.only or one.name.split(",")[0] in args.only]
    if unknown := set(args.only) - set(names()):
        raise ValueError(f"--only {', '.join(sorted(unknown))}: trainers are {', '.join(names())}")
    given = pairs(args.python, "--python")
    peers = {one.peer.package: one.peer for one in chosen if one.peer is not None}
    pythons = {
        name: Path(given[name]) if name in given else python_of(peer, args.environments, reporter.say)
        for name, peer in peers.items()
    }
    config = load(find_recipe(args.config), [*(f"--{word}" for word in args.set), *COMMON])
    work = Path(tempfile.mkdtemp(prefix="headstart-peers-")) if args.work is None else args.work
    try:
        return _measure(args, config, chosen, pythons, fixed, work, reporter)
    finally:
        if args.work is None:
            shutil.rmtree(work, ignore_errors=True)


def _measure(
    args: argparse.Namespace, config: RunConfig, chosen: list[Contender], pythons: dict[str, Path],
    fixed: dict[str, int], work: Path, reporter: Reporter,
) -> dict[str, Any]:  # fmt: skip
    quiet = replace(
        config, tracker=replace(config.tracker, kind="none"), output=replace(config.output, folder=str(work / "run"))
    )
    handover = hand_over(quiet, args.conversations, work / "handover", reporter)
    states = {"headstart": work / "cache"}
    for name in pythons:
        if PEERS[name].reads_states:
            states[name], seconds = write_states(handover, work)
            reporter.say(f"states for {name}: {seconds:.1f} s")
    contest = Contest(handover, work / f"runs-{os.getpid()}", pythons, states, args.threads)
    began = time.perf_counter()
    open_or_build(contest.cache, states["headstart"], Ranks())
    built = time.perf_counter() - began
    batches = {one.name: fixed.get(one.name.split(",")[0]) or _tried(contest, one, args, reporter) for one in chosen}
    runs = []
    for number in range(args.rounds):
        shift = number % len(chosen)
        for contender in [*chosen[shift:], *chosen[:shift]]:
            plan = contest.plan(batches[contender.name])
            runs.append(contest.run(contender, batches[contender.name], [*plan[:WARM_UP], *plan]))
            _tell(runs[-1], f"round {number + 1}/{args.rounds}", reporter)
    texts = handover.conversations
    return summarize(runs, built) | {
        "conversations": len(texts),
        "tokens": int(texts.lengths.sum()),
        "supervised": texts.answer_tokens,
        "made": contest.wanted,
        "threads": args.threads,
        "machine": f"{platform.machine()}, {os.cpu_count()} processors, {platform.system()}",
        "device": str(handover.target.device),
        "command": sys.argv,
    }


def _tried(contest: Contest, contender: Contender, args: argparse.Namespace, reporter: Reporter) -> int:
    """The batch size at which a contender is fastest on some of the data."""
    steps = {
        batch: contest.plan(batch)[: WARM_UP + math.ceil(args.trial_tokens / batch)] for batch in contender.batches
    }
    tried = [batch for batch in contender.batches if len(steps[batch]) > WARM_UP]
    if not tried:
        least = min(contender.batches)
        raise ValueError(f"{len(steps[least])} steps of {least} tokens are too few: name more --conversations")
    if left := [f"{batch:,}" for batch in contender.batches if batch not in tried]:
        reporter.say(f"{contender.name}: too few --conversations to try {' and '.join(left)} tokens a step")
    runs = []
    for batch in tried:
        runs.append(contest.run(contender, batch, steps[batch]))
        _tell(runs[-1], "trying", reporter)
    return best(runs)


def _tell(run: Run, what: str, reporter: Reporter) -> None:
    peak = run.process.peak / 2**30
    reporter.say(f"{what}: {run.contender.name}, {run.batch} tokens a step: {run.rate():,.0f} tokens/s, {peak:.2f} GiB")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0 when it was measured, 1 when it falls short of ``--at-least``, 2 for an error."""
    args = options().parse_args(arguments)
    try:
        if args.json is not None and not args.json.parent.is_dir():
            raise FileNotFoundError(f"--json {args.json}: the folder {args.json.parent} does not exist, make it first")
        report = measure(args, Reporter(True))
        print(f"{terms(report)}\n{table(report)}")
        if args.json is not None:
            write_json(args.json, report)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print("stopped", file=sys.stderr)
        return 143 if isinstance(stop, Terminated) else 130
    return int(args.at_least is not None and report["ratios"].get(CONTENDERS[0].name, 0.0) < args.at_least)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, terminate)
    sys.exit(main())
