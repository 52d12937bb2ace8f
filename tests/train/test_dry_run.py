"""`--dry-run` against the run itself: parameters, steps, disk exactly, memory within a factor; it writes nothing."""

from __future__ import annotations

import ctypes
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import train.dry_run as dry
from headstart import main
from tests.tiny import tiny_model
from tests.train.conftest import Launch, _reset
from tests.train.world import log_of, run
from train.memory import resident_bytes

FACTOR = 1.5  # between what memory was said to be needed and what was, either way


def asked(world: Path, *arguments: Any) -> tuple[dict[str, Any], str]:
    _reset()
    return dry.dry_run(["--config", str(world / "recipe.yaml"), *map(str, arguments)])


def bytes_of(*paths: Path) -> int:
    return sum(file.stat().st_size for path in paths for file in ([path] if path.is_file() else path.rglob("*"))
               if file.is_file())  # fmt: skip


def payload(path: Path) -> int:
    """Bytes of a safetensors file behind its header."""
    return path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.parametrize(
    "kind",
    [
        ("--heads.kind", "eagle"),
        ("--heads.kind", "eagle", "--heads.options.train_output", "false"),
        ("--heads.kind", "eagle", "--train.optimizer", "muon"),
        ("--heads.kind", "eagle", "--train.optimizer", "muon", "--train.row_beta", 0.9),
        ("--heads.kind", "medusa", "--heads.taps", "null", "--heads.draft_vocab_size", "null"),
        ("--heads.kind", "block", "--heads.options.confidence", "true"),
    ],
)
def test_parameters_steps_and_disk_are_exact(
    kind: tuple[str, ...], world: Path, launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    length = (*kind, "--train.max_steps", "null", "--train.epochs", 2, "--train.micro_tokens", 70, "--eval.prompts", 0)
    told, text = asked(world, *length)
    assert not (world / "run").exists() and not (world / "cache").exists(), "nothing is written"
    assert list((tmp_path / "scratch").iterdir()) == []
    report = launch(*length)
    folder = world / "run"
    weights = load_file(folder / "heads" / "heads.safetensors")
    parameters = sum(value.numel() for name, value in weights.items() if name != "target_ids")
    assert told["heads"]["trained"] + told["heads"]["frozen"] == parameters
    assert told["heads"]["trained"] == json.loads((folder / "run.json").read_text())["parameters"]
    assert told["target"]["parameters"] == sum(
        v.numel() for v in load_file(world / "target/model.safetensors").values()
    )
    assert told["steps"]["total"] == report["steps"] == log_of(folder)[-1]["step"]
    assert told["data"]["tokens"] == report["data"]["tokens"]
    disk = told["disk"]
    assert disk["heads"] == bytes_of(folder / "heads")
    place = max((folder / "checkpoints").iterdir())
    assert disk["checkpoint"] == bytes_of(place / "heads", place / "optimizer.safetensors")
    assert disk["prepared"] == bytes_of(folder / "prepared")
    assert sum(disk["states"].values()) == sum(map(states_of, (world / "cache").iterdir()))
    assert disk["total"] == sum(disk["parts"].values())
    assert f"{told['heads']['trained']:,} trained parameters" in text
    assert yaml.safe_load((folder / "config.yaml").read_text()) == told["settings"]
    again, _ = asked(world, *length)
    assert again["disk"]["states"] == {} and again["disk"]["found"] == disk["states"]


def states_of(cache: Path) -> int:
    """Bytes of the states in a cache."""
    return sum(payload(path) for path in cache.glob("*.safetensors")) + bytes_of(*cache.glob("*.bin"))


def peak_since(start: int) -> int:
    """Most memory of this process above ``start`` since the count was set back."""
    lines = Path("/proc/self/status").read_text().splitlines()
    highest = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return highest - start


@pytest.mark.parametrize("features", ["cached", "online"])
def test_memory_is_what_a_run_takes(world: Path, launch: Launch, features: str) -> None:
    """A target and heads large enough to stand out from everything else that the process holds."""
    model = tiny_model("llama", dtype=torch.float32, vocab=20_000, hidden_size=256, intermediate_size=512, head_dim=64)
    model.save_pretrained(world / "wide")
    del model
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (world / "target" / name).is_file():
            (world / "wide" / name).write_bytes((world / "target" / name).read_bytes())
    wide = ("--target.name", world / "wide", "--heads.draft_vocab_size", 12_000, "--data.features", features,
            "--train.batch_tokens", 900, "--train.micro_tokens", 900, "--train.max_steps", 2, "--eval.prompts", 0,
            "--eval.conversations", 0)  # fmt: skip
    told, _ = asked(world, *wide)
    needed = told["memory"]["total"] - told["memory"]["parts"]["process without the target"]
    assert needed > 150 * 2**20
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back to the system, or it would hide what is taken anew
    start = resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark begins anew
    launch(*wide)
    used = peak_since(start)
    assert needed / FACTOR < used < needed * FACTOR


def test_the_verb_and_the_script_tell_the_same(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--config", str(world / "recipe.yaml"), "--train.lr", "2e-3", "--output.folder", str(world / "other")]
    _reset()
    assert main(["train", *settings, "--dry-run", "--json", str(world / "plan.json")]) == 0
    shown = capsys.readouterr().out
    assert "lr: 0.002" in shown and f"folder: {world / 'other'}" in shown
    assert "6 of about" in shown and "trained parameters" in shown and "for each process at most" in shown
    plan = json.loads((world / "plan.json").read_text())
    assert plan["steps"]["total"] == 6 and plan["settings"]["train"]["lr"] == 0.002
    done = run([*settings, "--dry-run"])
    assert done.returncode == 0, done.stderr[-2000:]

    def lasting(text: str) -> list[str]:
        """Without what the machine had free, and what the process held, at that moment."""
        return [line for line in text.splitlines() if "free" not in line and "process without" not in line]

    assert lasting(done.stdout) == lasting(shown)
    assert not (world / "other").exists()
