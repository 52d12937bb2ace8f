"""Peers without their packages: modules of their names that note what they are given, and runs in this process."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.train.peers import fake_economize, fake_speculators
from train.peers import meter, ours
from train.peers.contest import Contest
from train.peers.handover import Handover, hand_over, write_states
from train.peers.inside.job import Job
from train.progress import Reporter
from train.settings import load
from train.train_heads import train

FAKES = {
    "economize": fake_economize,
    "economize.techniques": ModuleType("economize.techniques"),
    "economize.techniques.eagle3": fake_economize,
    "economize.train": fake_economize,
    "economize.train.data": fake_economize,
    "speculators": ModuleType("speculators"),
    "speculators.losses": fake_speculators,
    "speculators.models": ModuleType("speculators.models"),
    "speculators.models.eagle3": fake_speculators,
    "speculators.models.eagle3.data": fake_speculators,
    "speculators.train": ModuleType("speculators.train"),
    "speculators.train.data": fake_speculators,
    "speculators.train.trainer": fake_speculators,
    "hs_connectors": fake_speculators,
}
Runner = Callable[[Job], None]


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> dict[str, Runner]:
    """``run`` of each module that a peer's Python would execute, over the fakes; ours is the real one."""
    for name, module in FAKES.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("current_accelerator", "is_available", "synchronize"):  # so that they are put back
        monkeypatch.setattr(torch.accelerator, name, getattr(torch.accelerator, name))
    monkeypatch.setattr(fake_speculators, "get_local_rank", lambda: 0, raising=False)
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"{name} as installed")
    monkeypatch.setattr(fake_economize, "calls", {})
    monkeypatch.setattr(fake_speculators, "calls", {})
    found: dict[str, Runner] = {"train.peers.ours": ours.run}
    for name in ("economize", "speculators"):
        monkeypatch.delitem(sys.modules, f"train.peers.inside.{name}", raising=False)
        found[f"inside.{name}"] = importlib.import_module(f"train.peers.inside.{name}").run
        monkeypatch.delitem(sys.modules, f"train.peers.inside.{name}")
    return found


def decode(job: Path) -> None:
    """What economize's Python would do with a job of decoding, over the fake."""
    sys.modules.pop("train.peers.inside.economize_decode", None)
    try:
        importlib.import_module("train.peers.inside.economize_decode").run(json.loads(job.read_text()))
    finally:
        sys.modules.pop("train.peers.inside.economize_decode", None)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch, runners: dict[str, Runner]) -> list[list[str]]:
    """Runs happen in this process; the commands that they would have been."""
    commands = []

    def run(command: Sequence[str], environ: Mapping[str, str], log: Path, **more: float) -> Any:
        commands.append(list(command))
        if command[1].endswith("train_heads.py"):
            train(command[2:])
        elif command[2] == "inside.economize_decode":
            decode(Path(command[3]))
        else:
            runners[command[2]](Job.read(command[3]))
        return meter.Metered(1.5, 2.5, 3 << 30)

    monkeypatch.setattr(meter, "run", run)
    return commands


PLAIN = ("--heads.options.fc_norm=false", "--heads.options.norm_output=false")


def handed(world: Path, *settings: str) -> Handover:
    """The tiny world's conversations, handed over."""
    config = load(world / "recipe.yaml", [*PLAIN, *settings])
    return hand_over(config, 8, world / "handover", Reporter(False))


def contest_of(world: Path, *settings: str) -> Contest:
    """Everything that runs on it need."""
    handover = handed(world, *settings)
    pythons = {name: Path("nowhere") for name in ("economize", "speculators")}
    states = {"headstart": world / "cache", "speculators": write_states(handover, world)[0]}
    return Contest(handover, world / "runs", pythons, states, torch.get_num_threads())
