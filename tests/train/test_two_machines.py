"""Two machines, as two launches on loopback by the Slurm script: DDP and ZeRO-3 train what one process trains."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from tests.train.conftest import Launch
from tests.train.two_machines import ROOT, command, environment, main
from tests.train.world import finished, losses

QUICK = ("--train.max_steps", "2", "--eval.prompts", "0")


def free_port() -> int:
    """A port from which the script can make a job's number."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            if 20000 < probe.getsockname()[1] < 40000:
                return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("kind", "engine", "more"),
    [("nodes", "ddp", ()), ("zero3_nodes", "zero-3", ("--target.placement", "sharded"))],
)
def test_a_run_on_two_machines(
    world: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch, kind: str, engine: str, more: tuple[str, ...]
) -> None:
    monkeypatch.chdir(ROOT)  # the configurations name DeepSpeed's from here
    words = command(kind, "--config", str(world / "recipe.yaml"), *QUICK, *more, "--output.folder", str(world / kind))
    done = finished(words, 240, environment(world, free_port(), kind))
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads((world / kind / "report.json").read_text())
    assert (report["processes"], report["engine"]) == (2, engine)
    launch(*QUICK, "--output.folder", world / "one")
    assert list(losses(world / kind).values()) == pytest.approx(list(losses(world / "one").values()), rel=2e-5)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({}, "there is no command `ip` (package iproute2)"),
        (
            {"ip": "echo 'mount --make-shared: Operation not permitted' >&2; exit 1"},
            "`ip netns add headstart-a` failed: mo",
        ),
    ],
)
def test_without_namespaces_it_says_why(
    tools: dict[str, str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, text in tools.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["two_machines.py", str(tmp_path / "folder"), "--namespaces"])
    assert main() == 2
    said = capsys.readouterr().err
    assert f"error: no network namespaces here: {message}" in said and said.count("\n") == 1
