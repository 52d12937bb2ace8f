"""Train draft heads. This is the script to launch, and to copy and change.

accelerate launch train/train_heads.py                                        the quickstart recipe
accelerate launch train/train_heads.py --config configs/long.yaml             another recipe
accelerate launch train/train_heads.py --config configs/long.yaml --train.lr 3e-4 --output.folder runs/mine
python train/train_heads.py --help                                            all settings
python train/train_heads.py --config configs/long.yaml --dry-run              what it would be and need
"""

from __future__ import annotations

import sys
from pathlib import Path

# Launched as a script, Python puts train/ first on the path, where config.py and others would shadow a user's
# modules; what has to be there is the folder above it (unless headstart is installed, then it does no harm).
_HERE = Path(__file__).resolve().parent
sys.path[:] = [str(_HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != _HERE)]

import os  # noqa: E402
import signal  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from contextlib import nullcontext  # noqa: E402
from datetime import UTC, datetime  # noqa: E402
from typing import Any  # noqa: E402

from accelerate import Accelerator  # noqa: E402

from train.assemble import find_recipe, load_conversations, make_features, make_heads  # noqa: E402
from train.config import RunConfig  # noqa: E402
from train.dry_run import dry_run  # noqa: E402
from train.evaluation import evaluated  # noqa: E402
from train.files import held  # noqa: E402
from train.guards import memory_advice  # noqa: E402
from train.interrupt import Interrupted, Terminated, follow_launcher, terminate  # noqa: E402
from train.launch import start  # noqa: E402
from train.loop import Trainer  # noqa: E402
from train.output import already_done, finish  # noqa: E402
from train.pool import Pool  # noqa: E402
from train.progress import Reporter  # noqa: E402
from train.ranks import Ranks  # noqa: E402
from train.record import write_record  # noqa: E402
from train.settings import describe, load, parse  # noqa: E402
from train.spread import weights_hash  # noqa: E402
from train.targets import load_target  # noqa: E402
from train.trackers import Launch, begin, check_tracker, close  # noqa: E402

DRY = "--dry-run"


def train(arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Train heads as the command line ``arguments`` say; returns what report.json holds.

    Raises:
        ValueError, OSError: bad settings or data, or a disk that refuses; the message says what to do.
        Interrupted: Ctrl-C or SIGTERM came; a checkpoint was written.
    """
    recipe, overrides = parse(arguments)
    config = load(find_recipe(recipe), overrides)
    check_tracker(config)
    accelerator = start(config)
    ranks = Ranks(accelerator)
    with held(Path(config.output.folder), ranks):
        return _train(config, accelerator, ranks)


def _train(config: RunConfig, accelerator: Accelerator, ranks: Ranks) -> dict[str, Any]:
    began, started = time.monotonic(), datetime.now(UTC)
    reporter = Reporter(ranks.main)
    with memory_advice("while the target was loaded", "set target.dtype to bfloat16, or use a smaller target"):
        target = load_target(config, accelerator)
    conversations = load_conversations(config, "train", target, ranks, reporter)
    done = already_done(config, conversations, ranks)
    if done is not None:
        reporter.say(f"{config.output.folder} is finished (step {done['steps']}): nothing to do")
        return done
    before = weights_hash(target, ranks.main)
    unseen = None
    if config.eval.conversations or config.eval.prompts:  # before hours of work: what is wrong with them is told now
        unseen = evaluated(load_conversations(config, "heldout", target, ranks, reporter), config.eval)
    heads = make_heads(config, target, conversations, reporter)
    with Pool(config, heads, accelerator) if config.data.features == "workers" else nullcontext() as pool:
        heldout = None
        with memory_advice("while the target's states were computed", "lower data.max_length, or use a smaller target"):
            states = make_features(config, heads, conversations, ranks, reporter, pool)
            if unseen is not None:
                heldout = make_features(config, heads, unseen, ranks, reporter, pool)

        trainer = Trainer(config, accelerator, heads, states, heldout, reporter)
        trainer.resume()
        record = write_record(trainer, unseen, started)
        begin(accelerator, config, Launch(record["id"], len(record["launches"]) > 1, trainer.progress.step))
        try:
            trainer.run()
        except BaseException:
            close(accelerator)
            raise
        return finish(trainer, before, time.monotonic() - began)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0 when heads were written, 2 for an error, 128 + signal when stopped."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        print("Settings, with the quickstart recipe's values:")
        print(describe(load(find_recipe("quickstart.yaml"))))
        return 0
    signal.signal(signal.SIGTERM, terminate)
    try:
        if DRY in arguments:
            report, text = dry_run([word for word in arguments if word != DRY])
            print(text if report else "")
        else:
            train(arguments)
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        return stop.exit_status
    except KeyboardInterrupt as stop:
        print("stopped outside the training steps: run the same command again to go on", file=sys.stderr)
        return stop.exit_status if isinstance(stop, Terminated) else 130
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def leave(status: int) -> None:
    """End the process; one of several goes at once, since CPU workers may abort while the interpreter winds down."""
    sys.stdout.flush()
    sys.stderr.flush()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os._exit(status)
    sys.exit(status)


def script() -> int:
    """What the launched process does; also an error of the program ends it by :func:`leave`, or others would wait."""
    follow_launcher()
    try:
        return main()
    except Exception:
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    leave(script())
