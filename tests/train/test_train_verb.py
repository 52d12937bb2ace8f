"""`headstart train`: the script's training as a verb, with its settings, its errors and its exit status."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from headstart import main
from tests.train.conftest import _reset
from train.loop import Trainer


@pytest.fixture(autouse=True)
def _signals() -> Any:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def verb(world: Path, *arguments: str) -> int:
    _reset()
    return main(["train", "--config", str(world / "recipe.yaml"), *arguments])


def test_it_trains(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Settings stand anywhere, with a blank or an equals sign; the report goes where it is asked for."""
    settings = ["--train.max_steps", "2", "--json", str(world / "out.json"), "--train.lr=1e-3", "--eval.tokens", "4"]
    assert verb(world, *settings) == 0
    report = json.loads((world / "out.json").read_text())
    assert report["steps"] == 2 and report["settings"]["train.lr"] == 0.001
    assert report == json.loads((world / "run" / "report.json").read_text())
    assert "2 steps, 1.00 tokens per round" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train.lerning_rate", "1"], "unknown setting '--train.lerning_rate': did you mean train.lr?"),
        (["--foo", "1"], "unknown setting '--foo': did you mean"),
        (["stray"], "unknown setting 'stray'"),
        (["--output.resume"], "--output.resume needs a value, as in `--output.resume false`"),
        (["--data.train", "nowhere.jsonl"], "data.train is nowhere.jsonl, and nowhere.jsonl does not exist"),
        (["--heads.kind", "eagel"], "did you mean 'eagle'"),
    ],
)
def test_errors_are_one_line_and_status_2(
    arguments: list[str], message: str, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verb(world, *arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error


def test_a_signal_stops_it_as_it_stops_the_script(
    world: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Trainer._after_step

    def after(self: Trainer, *rest: Any) -> None:
        original(self, *rest)
        if self.progress.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_after_step", after)
        assert verb(world) == 128 + signal.SIGTERM
    assert "stopped by SIGTERM after step 2; checkpoint written to" in capsys.readouterr().err
    assert verb(world) == 0
    assert "resumed: step 2 of 6" in capsys.readouterr().err


def test_options_that_do_not_exist_name_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train-speed", "--conversation", "3", "--epocs", "2"])
    assert end.value.code == 2
    assert "unrecognized arguments: --epocs 2, did you mean --epochs?" in capsys.readouterr().err
