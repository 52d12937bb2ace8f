"""``gpu_heads.sh`` without a GPU: all of its parts at tiny sizes, its figures, and what it says when one fails."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from tests import gpu_heads
from tests.train.conftest import _fresh_accelerate
from tests.train.peers.conftest import in_process, runners

__all__ = ["_fresh_accelerate", "in_process", "runners"]
ROOT = Path(__file__).resolve().parents[1]


def test_every_part_runs_unattended(
    tmp_path: Path, in_process: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert gpu_heads.main(["--dry-run", "--out", str(out)]) == 0, capsys.readouterr().out
    report = json.loads((out / "report.json").read_text())
    assert report["failed"] == [] and report["dry_run"]
    assert report["train"]["steps"] >= 1 and (out / "heads" / "heads.safetensors").is_file()
    chain = report["worth"]["evaluation"]["budgets"]["chain 7"]
    assert chain["prompts"] == 2 and 1 <= chain["tokens_per_round"]["value"] <= 8
    assert report["worth"]["bench"]["speedup"] > 0
    loop = report["loop"]
    assert loop["step_seconds"] > 0 and 0 < loop["decoding_inside"] <= 1
    assert loop["inside"] == pytest.approx((loop["target_seconds"] + loop["heads_seconds"]) / loop["step_seconds"])
    tokens_of_a_step = 48
    assert loop["tokens_per_second"] * loop["step_seconds"] == pytest.approx(tokens_of_a_step)
    assert [Path(command[1]).name for command in in_process] == ["train_heads.py"] * 2
    shown = capsys.readouterr().out
    assert [line.split(" (")[0] for line in shown.splitlines() if ": done" in line] == [
        "train: done", "worth: done", "loop: done",
    ]  # fmt: skip


def test_a_part_that_fails_is_told_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(work: gpu_heads.Work) -> None:
        """Broken."""
        raise ValueError("no such thing")

    def well(work: gpu_heads.Work) -> None:
        """Well."""
        work.found["well"] = 1

    monkeypatch.setattr(gpu_heads, "PARTS", {"broken": broken, "well": well})
    assert gpu_heads.main(["--dry-run", "--out", str(tmp_path / "out")]) == 1
    assert "broken: FAIL ValueError: no such thing" in capsys.readouterr().out
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["failed"] == ["broken"] and report["well"] == 1


def test_when_the_time_is_over_what_was_found_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def well(work: gpu_heads.Work) -> None:
        """Well."""
        work.found["well"] = 1

    def long(work: gpu_heads.Work) -> None:
        """Long."""
        gpu_heads.terminate(15, None)

    monkeypatch.setattr(gpu_heads, "PARTS", {"well": well, "long": long, "never": well})
    assert gpu_heads.main(["--dry-run", "--out", str(tmp_path / "out")]) == 1
    shown = capsys.readouterr().out
    assert "long: FAIL Terminated" in shown and "never:" not in shown
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["failed"] == ["long"] and report["well"] == 1


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_heads.main(["--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == "FAIL: torch sees no GPU here\n" and not (tmp_path / "out").exists()


def test_the_script_ends_within_ten_minutes_and_hands_on_what_it_is_given(tmp_path: Path) -> None:
    """A stand-in for the interpreter prints what it gets."""
    stand_in = tmp_path / "python"
    stand_in.write_text('#!/bin/sh\necho "$PWD|$HF_HUB_OFFLINE|$*"\nexit 3\n')
    stand_in.chmod(0o755)
    script = ROOT / "tests" / "gpu_heads.sh"
    words = ["bash", str(script), "worth", "--dry-run"]
    settings = {"PATH": "/usr/bin:/bin", "PYTHON": str(stand_in)}
    done = subprocess.run(words, cwd=tmp_path, env=settings, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, f"{ROOT}|1|-m tests.gpu_heads worth --dry-run\n")
    assert "timeout --kill-after=10 590 " in script.read_text()
