"""What an arm took and how it is found again: stops, states that others made, and a peer that was asked otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from headstart import main
from infer.drafters import NoDrafter
from infer.evaluate import Question, Settings
from tests.train.comparison.test_compare import recipes, words
from train.compare import arms as arms_of
from train.compare.score import Contestant, Plan, score
from train.peers import meter

__all__ = ["recipes"]


def test_what_a_stopped_training_took_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*args: Any, **more: Any) -> meter.Metered:
        raise KeyboardInterrupt

    def to_its_end(*args: Any, **more: Any) -> meter.Metered:
        (tmp_path / "report.json").write_text(json.dumps({"seconds": 30.0}))
        return meter.Metered(40.0, 39.0, 1000)

    monkeypatch.setattr(meter, "run", stopped)
    with pytest.raises(KeyboardInterrupt):
        arms_of._metered(["train"], tmp_path, 1)
    before = json.loads((tmp_path / "spent.json").read_text())
    assert 0 < before["seconds"] < 5
    (tmp_path / "spent.json").write_text(json.dumps(before | {"seconds": 100.0}))
    monkeypatch.setattr(meter, "run", to_its_end)
    assert arms_of._metered(["train"], tmp_path, 1) == {"seconds": 140.0, "peak": 1000, "fixed": 10.0}
    assert arms_of._metered(["train"], tmp_path, 1)["seconds"] == 140.0, "found again finished, it took nothing more"


def test_what_a_killed_training_took_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*args: Any, **more: Any) -> meter.Metered:
        (tmp_path / "left.json").write_text((tmp_path / "spent.json").read_text())  # all that a kill leaves
        (tmp_path / "report.json").write_text(json.dumps({"seconds": 30.0}))
        return meter.Metered(40.0, 39.0, 1000)

    monkeypatch.setattr(meter, "run", killed)
    assert arms_of._metered(["train"], tmp_path, 1)["seconds"] == 40.0
    (tmp_path / "left.json").rename(tmp_path / "spent.json")
    (tmp_path / "report.json").unlink()
    assert arms_of._metered(["train"], tmp_path, 1)["seconds"] is None
    (tmp_path / "spent.json").unlink()
    monkeypatch.setattr(meter, "run", lambda *args, **more: meter.Metered(2.0, 2.0, 1000))
    assert arms_of._metered(["train"], tmp_path, 1)["seconds"] is None, "finished, and nobody said what it took"


def test_states_that_something_else_made_have_no_time(recipes: Path, in_process: list[list[str]]) -> None:
    ours = ("--arm", f"ours=recipe:{recipes}/recipe.yaml", "--temperatures", "0")
    assert main(words(recipes, *ours)) == 0
    assert json.loads((recipes / "out" / "report.json").read_text())["arms"]["ours"]["training"]["states"] > 0
    for kept in (recipes / "runs" / "states").glob("*.json"):
        kept.unlink()
    (recipes / "out").rename(recipes / "before")
    assert main(words(recipes, *ours)) == 0
    assert json.loads((recipes / "out" / "report.json").read_text())["arms"]["ours"]["training"]["states"] is None


def test_a_peer_that_was_asked_otherwise_is_not_taken_for_this_one(
    recipes: Path, in_process: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = ("--arm", "theirs=peer:economize@lr=0.5", "--temperatures", "0")
    assert main(words(recipes, *theirs)) == 0
    (recipes / "out").rename(recipes / "before")
    assert main(words(recipes, *theirs, "--set", "train.warmup_steps=3")) == 2
    assert "theirs-6 holds heads that were trained otherwise" in capsys.readouterr().err
    report = recipes / "runs" / "theirs-6" / "report.json"
    told = json.loads(report.read_text())
    del told["asked"]  # as an older version wrote it
    report.write_text(json.dumps(told))
    assert main(words(recipes, *theirs)) == 2
    assert "theirs-6 holds heads that were trained otherwise" in capsys.readouterr().err


def test_prompts_that_are_checked_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def figures(target: object, one: object, question: object, plan: Plan, place: int, checked: bool) -> object:
        seen.append(checked)
        return {}, {}

    monkeypatch.setattr("train.compare.score._figures", figures)
    questions = [Question(str(place), "all", torch.tensor([place])) for place in range(9)]
    score(cast(Any, None), Contestant(NoDrafter(), 0), questions, Plan(Settings(8), (), checked=3), "one")
    assert [place for place, real in enumerate(seen) if real] == [0, 4, 8]
