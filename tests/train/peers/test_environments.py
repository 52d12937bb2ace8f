"""An environment is made once, whole or not at all, with what the peer asks for and this project's own torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from train.peers import environments
from train.peers.environments import PEERS, python_of

TORCH = torch.__version__.partition("+")[0]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would have been run; making the environment makes its folder."""
    found: list[list[str]] = []

    def run(command: list[str]) -> str:
        found.append(command)
        if "venv" in command:
            (Path(command[-1]) / "bin").mkdir()
        return json.dumps([{"name": "torch", "version": TORCH}])

    monkeypatch.setattr(environments, "_run", run)
    return found


def asked(command: list[str]) -> list[str]:
    """The command without the environment's Python, and without what is said to pip itself."""
    return [word for word in command[3:] if not word.startswith("--") or word == "--yes"]


def test_it_is_made_once(tmp_path: Path, commands: list[list[str]]) -> None:
    said: list[str] = []
    python = python_of(PEERS["economize"], tmp_path, said.append)
    assert python == tmp_path / f"economize-0.3.2-torch-{TORCH}" / "bin" / "python" and len(said) == 1
    own = [f"torch=={TORCH}", "economize==0.3.2", f"transformers=={transformers.__version__}"]
    assert asked(commands[1]) == ["install", *own]
    assert json.loads((python.parents[1] / "packages.json").read_text()) == {"torch": TORCH}
    assert python_of(PEERS["economize"], tmp_path, said.append) == python
    assert len(said) == 1 and len(commands) == 3


def test_what_a_peer_never_imports_is_taken_out_again(tmp_path: Path, commands: list[list[str]]) -> None:
    python_of(PEERS["speculators"], tmp_path, lambda text: None)
    assert asked(commands[1]) == ["install", f"torch=={TORCH}", "speculators==0.9.0"]
    assert asked(commands[2]) == ["uninstall", "--yes", "torchvision", "torchaudio"]


def test_the_packages_are_those_that_pip_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Really asked: with --quiet some releases of pip list nothing."""
    real = environments._run
    monkeypatch.setattr(environments, "_run", lambda command: "" if "install" in command else real(command))
    python = python_of(PEERS["economize"], tmp_path, lambda text: None)
    assert "pip" in json.loads((python.parents[1] / "packages.json").read_text())


def test_a_failure_leaves_nothing_and_says_what_pip_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        environments, "_build", lambda peer, folder: environments._run(["sh", "-c", "echo no room; exit 3"])
    )
    with pytest.raises(OSError, match="ended with 3: no room"):
        python_of(PEERS["economize"], tmp_path, lambda text: None)
    assert list(tmp_path.iterdir()) == []
