"""Ablations: what their file may say, runs that are trained once, what is told of them, a stop in between."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from infer.metrics import Round, Stats
from train.compare import ablations
from train.compare.ablation_page import results, tables
from train.compare.ablation_plan import Group, Run, read, some
from train.compare.arms import Taught
from train.compare.score import Score

ROOT = Path(__file__).resolve().parents[3]
PLAN = """
config: {world}/recipe.yaml
minutes: 0.1
groups:
  unroll:
    asks: How deep?
    runs:
      - {{name: "3"}}
      - {{name: "1", set: {{heads.lookahead: 1}}}}
  start:
    asks: From where?
    runs:
      - {{name: its own}}
      - {{name: random, init: random}}
      - {{name: the norm, init: target_norm}}
  amount:
    asks: How many?
    axis: conversations
    runs:
      - {{name: all, at: 24}}
      - {{name: some, at: 6, conversations: 6}}
  answers:
    asks: Whose answers?
    runs:
      - {{name: own, data: regenerated}}
      - {{name: theirs, data: original}}
"""


def words(world: Path, *more: str) -> list[str]:
    (world / "plan.yaml").write_text(PLAN.format(world=world))
    (world / "prompts.jsonl").write_text('{"prompt": "say abc"}\n{"prompt": "say bad"}\n')
    place = ["--plan", str(world / "plan.yaml"), "--runs", str(world / "runs"), "--out", str(world / "out")]
    return [*place, "--prompts", str(world / "prompts.jsonl"), "--max-new-tokens", "6", "--dtype", "float32", *more]


def test_every_run_is_trained_once_and_told(
    world: Path, in_process: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ablations.main(words(world, "--steps", "3", "--data", f"original={world}/train.jsonl")) == 0
    assert len(in_process) == 5, "each once: the first of three groups is one training"
    report = json.loads((world / "out" / "report.json").read_text())
    unroll, start, amount, answers = report["groups"]
    assert [run["steps"] for run in (*unroll["runs"], *start["runs"], *amount["runs"])] == [3] * 7
    assert unroll["runs"][0]["heads"] == start["runs"][0]["heads"] == amount["runs"][0]["heads"]
    first_losses = [run["curve"][0][1] for run in start["runs"]]
    assert len(set(first_losses)) == 3, "they began with other weights"
    trained_on = (world / "runs" / "data").glob("6-*.jsonl")
    assert [len(path.read_text().splitlines()) for path in trained_on] == [6]
    assert answers["missing"] == ["regenerated"] and answers["runs"] == []
    assert sorted(path.name for path in (world / "out").iterdir()) == ["README.md", "ablations.png", "report.json"]
    shown = capsys.readouterr().out
    assert "Not run: it needs `--data regenerated=FILE`." in shown and "### How deep?" in shown
    assert shown.strip() in (world / "out" / "README.md").read_text()


def test_minutes_become_steps_by_a_trial(world: Path, in_process: list[list[str]]) -> None:
    assert ablations.main(words(world, "--only", "unroll", "--minutes", "0.001")) == 0
    runs = json.loads((world / "out" / "report.json").read_text())["groups"][0]["runs"]
    (kept,) = (world / "runs").glob("*-trial-*.json")
    steps = max(1, round(0.06 / json.loads(kept.read_text())["seconds_per_step"]))
    assert [run["steps"] for run in runs] == [steps, steps], "equal tokens: the recipe's own rate counts for all"
    assert len(in_process) == 3


def test_the_middle_step_of_a_trial_counts(tmp_path: Path) -> None:
    rates = [{"train/tokens_per_second": rate} for rate in (1, 50, 40, 60, 50)]  # the first waited for memory
    (tmp_path / "log.jsonl").write_text("\n".join(json.dumps(line) for line in (*rates, {"eval/loss": 1.0})))
    trial = Taught(tmp_path / "heads", steps=5, tokens=1000, seconds=99.0)
    assert ablations._seconds_per_step(trial) == 1000 / 5 / 50


def test_what_no_run_can_have_is_told_before_the_first_is_trained(
    world: Path, in_process: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = world / "prepared"
    folder.mkdir()
    assert ablations.main(words(world, "--steps", "3", "--set", f"data.train={folder}")) == 2
    assert "fewer conversations are taken of files, not of a prepared folder" in capsys.readouterr().err
    plan = (world / "plan.yaml").read_text()
    assert ablations.main([*words(world, "--steps", "3"), "--plan", str(_renamed(world, plan))]) == 2
    assert "did you mean heads.lookahead?" in capsys.readouterr().err
    assert in_process == [] and not (world / "out").exists()


def _renamed(world: Path, plan: str) -> Path:
    path = world / "renamed.yaml"
    path.write_text(plan.replace("heads.lookahead", "heads.lookahed"))
    return path


def stats(accepted: int) -> Stats:
    return Stats(tokens=8, log=[Round(7, 7, accepted, accepted + 1)] * 4)


def test_a_change_is_better_or_worse_only_where_the_prompts_are_sure() -> None:
    def score(*accepted: int) -> Score:
        each = [stats(count) for count in accepted]
        return Score({"chain 7": each, "tree 32": each}, {}, ["all"] * len(each))

    runs = tuple(Run(name, "x.yaml") for name in ("first", "lost", "won", "mixed"))
    found = [score(2, 2, 2), score(1, 1, 1), score(4, 3, 4), score(4, 1, 2)]
    done = Taught(Path("heads"), steps=3, tokens=99, seconds=1.0)
    group = results(Group("g", "Which?", runs), [(run, done, one) for run, one in zip(runs, found, strict=True)], [])
    assert group["runs"][1]["budgets"]["chain 7"]["times"]["value"] == 0.5
    assert group["runs"][0]["budgets"]["chain 7"]["accepted"] == {"value": 2.0, "low": 2.0, "high": 2.0}
    lines = [line for line in tables({"groups": [group]}).splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[-1] for line in lines[2:]] == [
        "the first |", "worse |", "better |", "cannot be told apart |",
    ]  # fmt: skip


def test_the_plan_that_comes_along_names_what_there_is() -> None:
    plan = read(ROOT / "configs" / "compare" / "ablations.yaml")
    names = [group.name for group in plan.groups]
    assert names == [
        "taps", "unroll", "optimizer", "loss", "norms", "vocabulary", "markov", "keys", "initialisation", "amount",
        "answers",
    ]  # fmt: skip
    for group in plan.groups:
        for run in group.runs:
            asked = [f"--{key}={value}" for key, value in run.set]
            config = ablations.load(ablations.find_recipe(run.recipe), asked)
            assert all(key.split(".")[0] in ("heads", "train") for key, _ in run.set), config
    whole = {run.name: run for run in some(plan, ["vocabulary"]).groups[0].runs}["all 49152"]
    assert ablations.load(ablations.find_recipe(whole.recipe), ["--heads.draft_vocab_size=null"]).heads == (
        ablations.load(ablations.find_recipe(whole.recipe), [f"--{key}={value}" for key, value in whole.set]).heads
    )
    loss = next(group for group in plan.groups if group.name == "loss").runs[-1]
    config = ablations.load(ablations.find_recipe(loss.recipe), [f"--{key}={value}" for key, value in loss.set])
    assert config.train.loss == {"soft_ce": 0.1, "tv": 1.8}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"minute": 3}, "there is no 'minute' (config, minutes, equal, groups) — did you mean 'minutes'?"),
        ({"equal": "steps"}, "equal one of tokens, time"),
        ({"groups": {"g": {"asks": "?", "runs": [{"name": "a"}]}}}, "runs has two or more"),
        ({"groups": {"g": {"asks": "?", "runs": [{"name": "a"}, {"name": "a"}]}}}, "two runs have one name"),
        ({"groups": {"g": {"asks": "?", "runs": [{"name": "a"}, {"set": {}}]}}}, "a run has no name"),
        (
            {"groups": {"g": {"asks": "?", "runs": [{"name": "a"}, {"name": "b", "init": "randm"}]}}},
            "g, b: init may be random, target_norm, target_layer — did you mean 'random'?",
        ),
        (
            {"groups": {"g": {"asks": "?", "axis": "n", "runs": [{"name": "a"}, {"name": "b"}]}}},
            "needs its place on it",
        ),
    ],
)
def test_a_plan_that_says_something_else_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    whole = {"config": "quickstart.yaml", "groups": {"g": {"asks": "?", "runs": [{"name": "a"}, {"name": "b"}]}}}
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(whole))
    assert read(path).minutes == 5
    path.write_text(yaml.safe_dump(whole | change))
    with pytest.raises(ValueError) as refused:
        read(path)
    assert message in str(refused.value) and str(path) in str(refused.value)


def test_what_cannot_be_run_is_an_error(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ablations.main(words(world, "--only", "unrol")) == 2
    assert "the groups are unroll, start, amount, answers — did you mean 'unroll'?" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"30 conversations are asked for, and .* has 24"):
        ablations.fewer(str(world / "train.jsonl"), 30, world / "some")
