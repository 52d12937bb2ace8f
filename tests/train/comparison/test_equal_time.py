"""Equal time: how many steps fit, what cannot be known, and what is held against what."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headstart import main
from tests.train.comparison.test_compare import recipes, words
from train.compare import arms as arms_of
from train.compare.arms import Taught
from train.compare.equal_time import steps_in

__all__ = ["recipes"]
DONE = Taught(Path("heads"), steps=10, seconds=25.0, states=100.0, fixed=5.0)


@pytest.mark.parametrize(("seconds", "steps"), [(107.0, 1), (108.9, 1), (109.0, 2), (125.0, 10), (306.0, 100)])
def test_states_and_start_are_paid_once_and_steps_each(seconds: float, steps: int) -> None:
    assert steps_in("ours", DONE, seconds) == steps


def test_what_does_not_fit_or_is_not_known_is_said() -> None:
    with pytest.raises(ValueError, match=r"ours needs 105 s for states and start, and 2.0 s a step: give more time"):
        steps_in("ours", DONE, 106.9)
    with pytest.raises(ValueError, match="how long its states took, which something else made: ours needs a --runs"):
        steps_in("ours", replace(DONE, states=None), 1000.0)
    with pytest.raises(ValueError, match="how long it took, since it was killed: ours needs a --runs folder"):
        steps_in("ours", replace(DONE, seconds=None), 1000.0)


def test_arms_of_equal_time_are_held_against_each_other(
    recipes: Path, in_process: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = arms_of.SOURCES["recipe"]
    each = {"ours": 1.0, "deep": 2.0}  # seconds a step, so one has twice the steps of the other
    monkeypatch.setitem(
        arms_of.SOURCES,
        "recipe",
        lambda arm, course: replace(
            whole(arm, course), seconds=5 + course.steps * each[arm.name[:4]], states=2.0, fixed=5.0
        ),
    )
    two = ("--arm", f"ours=recipe:{recipes}/recipe.yaml", "--arm", f"deep=recipe:{recipes}/medusa.yaml")
    assert main(words(recipes, *two, "--temperatures", "0", "--seconds", "17")) == 0
    report = json.loads((recipes / "out" / "report.json").read_text())
    assert [report["arms"][name]["training"]["steps"] for name in ("ours, 17 s", "deep, 17 s")] == [10, 5]
    assert set(report["times"]) == {"deep"} and set(report["times_of_equal_time"]) == {"deep, 17 s"}
    assert "| accepted drafts a round: ours, 17 s over | chain 7, T=0" in capsys.readouterr().out
