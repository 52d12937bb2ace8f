"""Another project's EAGLE-3, trained by its own code on our data and brought home as heads that our engine decodes.

python train/peers/teach.py economize --steps 400 --lr 1e-3 --out runs/peers/economize-1e-3
python train/peers/teach.py speculators --steps 400 --lr 1e-3 --out runs/peers/speculators-1e-3
headstart eval runs/peers/economize-1e-3/heads

It sees the very steps that ``train_heads.py`` takes with the same recipe: the same conversations, in the same order, so
as many tokens. The folder then holds ``heads/`` (imported), ``checkpoint/`` (as the peer saved it), ``curve.jsonl``
(loss and accuracy by depth, as the peer counts them) and ``report.json``.
"""

from __future__ import annotations

import sys
from pathlib import Path

# As a script its own folder stands first on the path, where its neighbours would shadow other modules.
_HERE = Path(__file__).resolve().parent
sys.path[:] = [str(_HERE.parents[1]), *(entry for entry in sys.path if Path(entry or ".").resolve() != _HERE)]

import argparse  # noqa: E402
import hashlib  # noqa: E402
import json  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
from collections.abc import Mapping, Sequence  # noqa: E402
from dataclasses import dataclass, field, replace  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402

from heads.formats import import_heads  # noqa: E402
from heads.formats.folder import new_folder  # noqa: E402
from train.assemble import find_recipe  # noqa: E402
from train.batches import plan_epoch  # noqa: E402
from train.config import RunConfig  # noqa: E402
from train.interrupt import Terminated, terminate  # noqa: E402
from train.peers.contest import Contender, Contest, optimizer_of  # noqa: E402
from train.peers.environments import PEERS, Peer, default_root, python_of  # noqa: E402
from train.peers.handover import hand_over, write_states  # noqa: E402
from train.peers.inside.job import write_json  # noqa: E402
from train.progress import Reporter  # noqa: E402
from train.settings import load, to_dict  # noqa: E402


@dataclass(frozen=True)
class Lesson:
    """What a peer is to learn: a recipe, its steps and rate, where files lie, and options that only this peer has."""

    peer: Peer
    config: RunConfig
    steps: int
    lr: float
    work: Path
    python: Path
    threads: int
    extra: dict[str, Any] = field(default_factory=dict)


def steps_of(config: RunConfig, lengths: np.ndarray, count: int) -> list[list[int]]:
    """The first ``count`` steps of our training with this recipe, over as many epochs as they take."""
    settings, epoch = config.train, 0
    found: list[list[int]] = []
    while len(found) < count:
        found += plan_epoch(lengths, settings.batch_tokens, settings.bucket, settings.seed, epoch)
        epoch += 1
    return found[:count]


def asked(config: RunConfig, steps: int, lr: float, extra: Mapping[str, Any]) -> str:
    """All that tells these heads from others, as a digest: where a run's files lie does not."""
    plain = to_dict(config)
    what: dict[str, Any] = {name: plain[name] for name in ("target", "heads")}
    what["data"] = {key: value for key, value in plain["data"].items() if key != "cache_folder"}
    what["train"] = {key: plain["train"][key] for key in ("batch_tokens", "bucket", "seed", "precision")}
    what |= {"steps": steps, "optimizer": optimizer_of(config, lr), "extra": dict(extra)}
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()


def teach(lesson: Lesson, out: Path, reporter: Reporter) -> dict[str, Any]:
    """Train a peer's heads and import them into the new folder ``out``; returns what report.json holds.

    Raises:
        ValueError: bad settings, heads that came out otherwise than asked, or a checkpoint that cannot be imported.
        OSError: a run failed, or ``out`` holds something.
    """
    config, peer = lesson.config, lesson.peer
    with new_folder(out) as partial:
        # all in this run's own folder: another that starts meanwhile, with other settings, would write over it
        mine = partial / "run"
        quiet = replace(config, output=replace(config.output, folder=str(mine)))
        handover = hand_over(quiet, None, mine / "handover", reporter)
        newer = [name for name in ("fc_norm", "norm_output") if handover.heads.config.options[name]]
        if newer and not peer.norms:
            off = " ".join(f"--set heads.options.{name}=false" for name in newer)
            raise ValueError(f"{peer.package} has no {' and no '.join(newer)}: train without, by {off}")
        states, states_seconds = {}, 0.0
        if peer.reads_states:
            states[peer.package], states_seconds = write_states(handover, lesson.work)
        contest = Contest(handover, mine, {peer.package: lesson.python}, states, lesson.threads)
        steps = steps_of(config, handover.conversations.lengths, lesson.steps)
        contender = Contender(peer.package, peer, "cached" if peer.reads_states else "online", ())
        reporter.say(f"{peer.package}: {len(steps)} steps at {lesson.lr:g}")
        done = contest.run(contender, config.train.batch_tokens, steps, keep=True, lr=lesson.lr, extra=lesson.extra)
        lines = [json.dumps({"step": number, **step}) for number, step in enumerate(done.result["steps"], 1)]
        (partial / "curve.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (done.folder / done.result["checkpoint"]).rename(partial / "checkpoint")
        shutil.rmtree(mine)
        imported = import_heads(
            partial / "checkpoint", handover.target, partial / "heads", lookahead=handover.heads.config.lookahead
        )
        report = {
            "peer": peer.package,
            "asked": asked(config, lesson.steps, lesson.lr, lesson.extra),
            "versions": done.result["versions"],
            "format": imported.format,
            "steps": len(steps),
            "optimizer": optimizer_of(config, lesson.lr) | lesson.extra,
            "tokens": sum(step["tokens"] for step in done.result["steps"]),
            "supervised": sum(step["supervised"] for step in done.result["steps"]),
            "seconds": sum(step["seconds"] for step in done.result["steps"]),
            "process_seconds": done.process.seconds,
            "states_seconds": states_seconds,
            "peak_bytes": done.process.peak,
            "made": contest.wanted,
            "frozen": done.result["frozen"],
            "last": done.result["steps"][-1],
            "command": sys.argv,
        }
        write_json(partial / "report.json", report)
    return report


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("peer", choices=PEERS, help="whose trainer")
    add("--config", default="quickstart.yaml", help="recipe of kind eagle: data, shape, batches, schedule")
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="a setting over the recipe's")
    add("--steps", type=int, required=True, help="optimizer steps")
    add("--lr", type=float, required=True, help="highest learning rate")
    add("--muon", action="store_true", help="speculators' own default optimizer instead of AdamW")
    add("--out", type=Path, required=True, metavar="FOLDER", help="a new folder; none is overwritten")
    add("--work", type=Path, default=Path("runs/peers/work"), help="the target's states; shared by runs")
    add("--threads", type=int, default=torch.get_num_threads(), help="(default: %(default)s)")
    add("--environments", type=Path, default=default_root(), help="where the peers' lie (default: %(default)s)")
    add("--python", type=Path, metavar="PATH", help="the peer's Python, made by yourself")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0 when heads were written, 2 for an error."""
    args, reporter = options().parse_args(arguments), Reporter(True)
    try:
        if min(args.steps, args.threads) < 1 or not args.lr > 0:
            raise ValueError("--steps, --threads and --lr must be above 0")
        if args.muon and args.peer != "speculators":
            raise ValueError(f"--muon is an option of speculators, which {args.peer} lacks")
        peer = PEERS[args.peer]
        config = load(find_recipe(args.config), [f"--{word}" for word in args.set])
        python = args.python or python_of(peer, args.environments, reporter.say)
        extra = {"optimizer": "muon"} if args.muon else {}
        lesson = Lesson(peer, config, args.steps, args.lr, args.work, python, args.threads, extra)
        report = teach(lesson, args.out, reporter)
        print(f"{args.out}: {report['tokens']:,} tokens, loss {report['last']['loss']:.3f}, heads in {args.out}/heads")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print("stopped", file=sys.stderr)
        return 143 if isinstance(stop, Terminated) else 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, terminate)
    sys.exit(main())
