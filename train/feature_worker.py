"""Computes the target's states for a training run that goes on elsewhere. Launched by the run, or by hand:

python train/feature_worker.py SPOOL --device cuda:3

SPOOL is the run's data.spool_folder, on a disk that both see. The worker waits for the run, computes what it asks for,
and ends when the run has ended. Several can work for one run; one that dies leaves its work to the others.
"""

from __future__ import annotations

import sys
from pathlib import Path

# as in train_heads.py: the folder above has to be on the path, and this one must not be
_HERE = Path(__file__).resolve().parent
sys.path[:] = [str(_HERE.parent), *(entry for entry in sys.path if Path(entry or ".").resolve() != _HERE)]

import argparse  # noqa: E402
import os  # noqa: E402
import socket  # noqa: E402
import time  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402

from heads.identity import TargetIdentity  # noqa: E402
from heads.target import Target  # noqa: E402
from train.config import TargetConfig, TrainConfig  # noqa: E402
from train.features import run_target  # noqa: E402
from train.kernels import check_kernels, use_in_target  # noqa: E402
from train.spool import Spool, pauses, wait_until  # noqa: E402
from train.storage import Storage  # noqa: E402
from train.targets import open_target  # noqa: E402

WAIT_SECONDS = 1800.0  # for the run to begin
LOOK_SECONDS = 1.0  # between looks whether it still lives


def serve(spool: Spool, about: dict[str, Any], target: Target) -> int:
    """Answer requests until the run has ended; returns how many were answered."""
    taps = tuple(about["taps"])
    storage = Storage(len(taps), target.hidden_size, getattr(torch, about["feature_dtype"]))
    done, looked, pause = 0, time.monotonic(), pauses()
    while True:
        with spool.claimed() as request:
            if request is not None:
                name, asked = request
                try:
                    ids, loss_mask = (asked[part].to(target.device) for part in ("ids", "loss_mask"))
                    columns = run_target(target, taps, ids, loss_mask, storage)
                    spool.reply(name, {part: values.cpu().contiguous() for part, values in columns.items()})
                except (RuntimeError, MemoryError) as error:  # out of memory, above all
                    shape = "×".join(map(str, asked["ids"].shape))
                    spool.fail(name, f"states of a batch of {shape} tokens: {error}")
        if request is not None:
            done, pause = done + 1, pauses()
        elif time.monotonic() - looked > LOOK_SECONDS:
            looked = time.monotonic()
            if not spool.in_use(about):
                return done
        else:
            time.sleep(next(pause))


def work(folder: Path, device: str) -> int:
    """Be a worker of the run that uses the folder.

    Raises:
        ValueError: no run began in time, or this machine's target is not the run's.
    """
    spool = Spool(folder)

    def begun() -> bool:
        about = spool.about()
        return about is not None and spool.in_use(about)

    if not wait_until(begun, WAIT_SECONDS):
        raise ValueError(
            f"no run has begun in {folder}: launch it with data.features workers, data.spool_folder {folder}"
        )
    about = spool.about()
    assert about is not None
    with spool.working(f"{socket.gethostname()}-{os.getpid()}"):
        target = open_target(TargetConfig(**about["target"]), torch.device(device))
        target.check(TargetIdentity.from_dict(about["identity"]))
        kernels = TrainConfig(kernels=about["kernels"])
        check_kernels(kernels, target.device)
        use_in_target(kernels, target)
        done = serve(spool, about, target)
    spool.remove()  # the run has ended: if it was killed, nobody else does
    return done


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0 when the run has ended, 2 for an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spool", type=Path, help="the run's data.spool_folder")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    args = parser.parse_args(arguments)
    try:
        print(f"{work(args.spool, args.device)} batches computed", file=sys.stderr)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())
