"""Low-rank factors are trained alike by every engine; what is frozen below them is spread, gathered, and stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.train.conftest import Launch
from tests.train.test_engines import COMMON, TORCH, arguments, differences, launch_all

LORA = (
    *COMMON,
    "--train.micro_tokens",
    "160",
    "--eval.prompts",
    "0",
    "--heads.lora.rank",
    "4",
    "--train.save_every",
    "2",
)
ENGINES = ("ddp", "fsdp2", "zero2", "zero3")
RESUMED = [("fsdp2", "ddp"), ("zero3", "zero3")]  # engine, and the one whose checkpoint it goes on from
BOUNDS = {True: 1e-9, False: 2e-5}  # in float64, which torch's own engines are run in, and in float32


def test_every_engine_trains_the_same_factors(world: Path, launch: Launch) -> None:
    launch("--train.max_steps", 4, "--eval.prompts", 0, "--eval.conversations", 0, "--output.folder", world / "base")
    lora = (*LORA, "--heads.init", str(world / "base" / "heads"))
    runs: list[dict[str, Any]] = [
        {"engine": engine, "arguments": arguments(world, f"{engine}-lora", engine, *lora)} for engine in ENGINES
    ]
    for engine, before in RESUMED:
        name = f"{engine}-of-{before}"
        half = {"half_of": str(world / f"{before}-lora"), "folder": str(world / name)}
        runs.append({"engine": engine, "arguments": arguments(world, name, engine, *lora), **half})
    launch_all(world, runs)
    for double in (True, False):
        wide = ("--target.dtype", "float64", "--data.feature_dtype", "float64") if double else ()
        launch(*lora, *wide, "--output.folder", world / f"one-{double}")
    base = load_file(world / "base" / "heads" / "heads.safetensors")
    for engine, name in [(e, f"{e}-lora") for e in ENGINES] + [(e, f"{e}-of-{before}") for e, before in RESUMED]:
        folder, one = world / name, world / f"one-{engine in TORCH}"
        assert differences(folder, one) < BOUNDS[engine in TORCH], name
        ours, theirs = (load_file(run / "adapter" / "adapter.safetensors") for run in (folder, one))
        assert ours.keys() == theirs.keys() and all(ours[name].shape == theirs[name].shape for name in ours)
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, rtol=1e-3, atol=1e-6)
        assert any(value.any() for key, value in ours.items() if "lora_B" in key), "they learned"
        kept = load_file(folder / "checkpoints" / "step-00000004" / "heads" / "heads.safetensors")
        for key, value in base.items():  # to the last bit
            held = kept.get(key, kept.get(key.replace(".weight", ".base_layer.weight")))
            assert held is not None and torch.equal(held.to(value.dtype), value), (name, key)
        record = json.loads((folder / "adapter" / "adapter.json").read_text())
        assert record["base"] == str(world / "base" / "heads") and record["heads"]["lora"]["rank"] == 4
