"""Every engine is the same training: losses, evaluation and weights of two processes are those of one.

One launch serves all configurations. ZeRO computes in float32, so it is compared with one process in float32; torch's
own engines in float64, where next to nothing is forgiven.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.train.conftest import Launch
from tests.train.world import ROOT, finished, half_way, log_of

DOUBLE = ("--target.dtype", "float64", "--data.feature_dtype", "float64")
COMMON = ("--train.batch_tokens", "320", "--train.max_steps", "4", "--train.schedule", "constant")
ONCE = (*COMMON, "--train.micro_tokens", "160", "--train.save_every", "2")  # one micro-batch a process
FOUR = (*COMMON, "--train.micro_tokens", "40", "--data.features", "online", "--eval.prompts", "0")
TORCH, ZERO = ("ddp", "fsdp2"), ("zero0", "zero1", "zero2", "zero3")
ACCUMULATED = [  # engine, where the target stands
    ("ddp", "outside"), ("ddp", "inside"), ("fsdp2", "outside"), ("fsdp2", "sharded"),
    ("zero0", "outside"), ("zero1", "inside"), ("zero2", "inside"), ("zero3", "inside"), ("zero3", "sharded"),
]  # fmt: skip
RESUMED = [  # engine, and the one whose checkpoint it goes on from
    ("fsdp2", "fsdp2"), ("fsdp2", "ddp"), ("zero1", "zero1"), ("zero3", "zero3"), ("zero3", "zero2"),
]  # fmt: skip


def configurations(folder: Path) -> Path:
    """DeepSpeed's as they ship, and one for its plain data parallelism."""
    folder.mkdir()
    for path in (ROOT / "configs" / "deepspeed").glob("*.json"):
        shutil.copy(path, folder)
    plain = json.loads((folder / "zero1.json").read_text())
    (folder / "zero0.json").write_text(json.dumps(plain | {"zero_optimization": {"stage": 0}}))
    return folder


def arguments(world: Path, name: str, engine: str, *more: str) -> list[str]:
    words = ["--config", str(world / "recipe.yaml"), *more, "--output.folder", str(world / name)]
    words += ["--train.engine", "fsdp2"] if engine == "fsdp2" else []
    return [*words, *DOUBLE] if engine in TORCH else words


def launch_all(world: Path, runs: list[dict[str, Any]]) -> None:
    (world / "runs.json").write_text(json.dumps(runs))
    configs = configurations(world / "deepspeed")
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    worker = [str(ROOT / "tests" / "train" / "engine_worker.py"), str(world / "runs.json"), str(configs)]
    done = finished([*command, *worker], 500, environ)
    assert done.returncode == 0, done.stderr[-4000:]


def differences(ours: Path, theirs: Path) -> float:
    """Largest relative difference of anything logged, and of the weights."""
    one, two = log_of(theirs), log_of(ours)
    assert [line["step"] for line in two] == [line["step"] for line in one]
    free = {"train/tokens_per_second", "train/peak_memory_gib"}
    found = [0.0]
    for mine, other in zip(two, one, strict=True):
        names = other.keys() - free - (set() if "train/grad_norm" in mine else {"train/grad_norm"})
        assert mine.keys() - free == names
        found += [abs(mine[name] - other[name]) / max(abs(other[name]), 1e-3) for name in names]
    weights = [load_file(folder / "heads" / "heads.safetensors") for folder in (ours, theirs)]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[1].items():
        assert weights[0][name].shape == value.shape and weights[0][name].dtype == value.dtype
        found.append(float((weights[0][name].double() - value.double()).norm() / value.double().norm()))
    return max(found)


def test_every_engine_is_the_same_training(world: Path, launch: Launch) -> None:
    """Two processes and one, every engine, one micro-batch and four, the target outside, inside and sharded."""
    runs = [
        {"engine": engine, "arguments": arguments(world, f"{engine}-once", engine, *ONCE)} for engine in TORCH + ZERO
    ]
    for engine, place in ACCUMULATED:
        words = arguments(world, f"{engine}-{place}", engine, *FOUR, "--target.placement", place)
        runs.append({"engine": engine, "arguments": words})
    wrong = arguments(world, "wrong", "ddp", *FOUR)
    runs.append({"engine": "ddp", "mistake": "never averaged", "arguments": wrong})
    for engine, before in RESUMED:
        name = f"{engine}-of-{before}"
        words = arguments(world, name, engine, *ONCE)
        half = {"half_of": str(world / f"{before}-once"), "folder": str(world / name)}
        runs.append({"engine": engine, "arguments": words, **half})
    launch_all(world, runs)

    for dtype, more in (("float64", DOUBLE), ("float32", ())):
        launch(*ONCE, *more, "--output.folder", world / f"one-{dtype}")
        launch(*FOUR, *more, "--output.folder", world / f"one-four-{dtype}", "--train.micro_tokens", 10_000)
    bounds = {"float64": 1e-9, "float32": 2e-5}
    found = {}
    for run in runs:
        folder = Path(run["arguments"][run["arguments"].index("--output.folder") + 1])
        dtype = "float64" if run["engine"] in TORCH else "float32"
        once = folder.name.endswith("-once") or "-of-" in folder.name
        reference = world / f"one-{'' if once else 'four-'}{dtype}"
        found[folder.name] = differences(folder, reference) / bounds[dtype]
    mistaken = found.pop("wrong")
    assert max(found.values()) < 1, found
    assert mistaken > 1000

    for engine, before in RESUMED:
        if engine == before:  # to the bit what it had been without a stop
            resumed, through = world / f"{engine}-of-{engine}", world / f"{engine}-once"
            assert differences(resumed, through) == 0.0, engine

    whole = json.loads((world / "ddp-outside" / "held.json").read_text())[0]
    for name in ("ddp-inside", "zero1-inside", "zero2-inside"):
        assert json.loads((world / name / "held.json").read_text()) == [whole, whole], name
    for name in ("fsdp2-sharded", "zero3-inside", "zero3-sharded"):  # halves, filled up where they are odd
        for held in json.loads((world / name / "held.json").read_text()):
            assert held["target"] == pytest.approx(whole["target"] / 2, rel=0.02), name
            assert held["heads"] == pytest.approx(whole["heads"] / 2, rel=0.02), name
    # and one process goes on from what two left under ZeRO-3
    half_way(world / "zero3-once", world / "one-of-zero3")
    launch(*ONCE, "--output.folder", world / "one-of-zero3")
    assert differences(world / "one-of-zero3", world / "one-float32") < bounds["float32"]
    names = {engine: json.loads((world / f"{engine}-once" / "report.json").read_text())["engine"] for engine in ZERO}
    assert names == {"zero0": "zero-0", "zero1": "zero-1", "zero2": "zero-2", "zero3": "zero-3"}
