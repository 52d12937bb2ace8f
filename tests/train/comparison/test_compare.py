"""The comparison as a user runs it: arms of every source, equal tokens, figures of every budget, whole files."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heads.target import Target
from headstart import main
from infer.evaluate import Question
from infer.walk import Walk
from tests.train.peers.conftest import PLAIN
from tests.train.world import RECIPE
from train.compare import arms as arms_of
from train.compare import score as score_of
from train.compare.judge import Judge

MEDUSA = "heads: {{kind: medusa, lookahead: 3, draft_vocab_size: 100}}"


@pytest.fixture
def recipes(world: Path) -> Path:
    """A second recipe, of another kind, beside the world's own."""
    text = RECIPE.replace(next(line for line in RECIPE.splitlines() if line.startswith("heads:")), MEDUSA)
    (world / "medusa.yaml").write_text(text.format(folder=world).replace("batch_tokens: 160", "batch_tokens: 80"))
    rows = [{"prompt": f"say {word}", "category": word[0]} for word in ("abc", "bad", "add")]
    (world / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return world


def words(world: Path, *more: str) -> list[str]:
    off = [part for setting in PLAIN for part in ("--set", setting.removeprefix("--"))]
    small = ["--steps", "6", "--max-new-tokens", "10", "--depth", "4", "--control-prompts", "1", "--dtype", "float32"]
    place = ["--runs", str(world / "runs"), "--out", str(world / "out"), "--prompts", str(world / "prompts.jsonl")]
    return ["compare", "--config", str(world / "recipe.yaml"), *off, *small, *place, "--python", "economize=x", *more]


def arms(world: Path) -> list[str]:
    found = [f"ours=recipe:{world}/recipe.yaml@heads.lookahead=2", f"medusa=recipe:{world}/medusa.yaml"]
    found.append("theirs=peer:economize@lr=0.5")
    return [part for arm in found for part in ("--arm", arm)]


def test_arms_of_every_source(recipes: Path, in_process: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(recipes, *arms(recipes), "--temperatures", "0,1")) == 0
    shown = capsys.readouterr().out
    out = recipes / "out"
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md", "accepted_by_position.png", "report.json", "tokens_by_budget.png", "training.png",
    ]  # fmt: skip
    report = json.loads((out / "report.json").read_text())
    assert list(report["arms"]) == ["ours", "medusa", "theirs", "no draft", "prompt lookup", "target itself"]
    tokens = {name: report["arms"][name]["training"]["tokens"] for name in ("ours", "medusa", "theirs")}
    assert len(set(tokens.values())) == 1, "the recipe's own batches do not count: all see as many tokens"
    ours = report["arms"]["ours"]
    assert list(ours["decoded"]) == ["chain 7 T=0", "tree 32 T=0", "chain 7 T=1", "tree 32 T=1"]
    for name, arm in report["arms"].items():
        for walked, decoded in arm["walked_and_decoded"].values():
            assert walked == decoded, name
    assert report["arms"]["no draft"]["greedy"]["tree 64"]["tokens_per_round"]["value"] == 1.0
    assert report["columns"] == ["chain 7, T=0", "tree 32, T=0", "chain 7, T=1", "tree 32, T=1"]
    assert [point[0] for point in ours["training"]["curve"]] == [1, 2, 3, 4, 5, 6]
    itself = report["arms"]["target itself"]["greedy"]
    # nine tokens behind the prefill's in rounds of 4, 4 and 1: always right, and never beyond the end
    assert itself["chain 3"]["prompts"] == 1 and (itself["chain 3"]["rounds"], itself["chain 3"]["accepted"]) == (3, 6)
    assert set(report["times"]) == {"medusa", "theirs"} and "tree 16" in report["times"]["medusa"]
    own = report["arms"]["theirs"]["own_engine"]["chain 7"]
    assert (own["prompts"], own["rounds"], own["accepted"]) == (3, 9, 18), "nine tokens a prompt, in threes"
    text = (out / "README.md").read_text()
    assert "| theirs | 3.00 [3.00, 3.00] |" in text
    prices = {name: report["arms"][name]["price"] for name in ("ours", "medusa", "theirs")}
    assert {name: one["passes"] for name, one in prices.items()} == {"ours": 4, "medusa": 1, "theirs": 4}
    assert all("price" not in report["arms"][name] for name in ("no draft", "prompt lookup", "target itself"))
    for name, one in prices.items():
        for column in report["columns"]:
            budget, heat = column.split(", T=")
            found = report["arms"][name]["greedy" if heat == "0" else "decoded"]
            tau = found[budget if heat == "0" else f"{budget} T=1"]["loop_free_tokens_per_round"]["value"]
            whole = one["draft"][budget] + one["pass"][budget]
            assert one["speedup"][column] == pytest.approx(tau / whole) and min(one["draft"][budget], tau) > 0
    assert "| in plain passes of the target | parameters | passes a chain |" in text
    assert "accepted drafts a round: ours over" in shown and "accepted drafts a round: ours over" in text
    assert f"teach.py economize --config {recipes}/recipe.yaml --set heads.options.fc_norm=false" in text
    assert "--steps 6 --lr 0.5 --set" in text and "![training.png](training.png)" in text


def test_what_is_trained_is_found_again_and_heads_may_be_there(recipes: Path, in_process: list[list[str]]) -> None:
    one = ("--arm", f"ours=recipe:{recipes}/recipe.yaml", "--arm", "theirs=peer:economize", "--temperatures", "0")
    assert main(words(recipes, *one)) == 0
    first = json.loads((recipes / "out" / "report.json").read_text())["arms"]
    (recipes / "out").rename(recipes / "before")
    ran = len(in_process)
    there = ("--arm", f"again=heads:{first['ours']['training']['heads']}")
    assert main(words(recipes, *one, *there)) == 0
    second = json.loads((recipes / "out" / "report.json").read_text())["arms"]
    assert [Path(command[1]).name for command in in_process[ran:]] == ["train_heads.py"], "which says it is finished"
    assert second["again"]["greedy"] == second["ours"]["greedy"] == first["ours"]["greedy"]
    assert second["again"]["training"]["tokens"] is None
    assert second["ours"]["training"] == first["ours"]["training"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--arm", "ours"], "write NAME=SOURCE:WHAT, as in ours=recipe:quickstart.yaml"),
        (["--arm", "a=recpe:x"], "heads come from recipe, peer, heads — did you mean 'recipe'?"),
        (["--arm", "a=recipe:quickstart.yaml@train.lr"], "train.lr has no value behind it"),
        (["--arm", "a=heads:x", "--arm", "a=heads:y"], "two arms have one name"),
        (["--arm", "a=peer:vllm"], "peers are economize, speculators, not vllm"),
        (["--arm", "a=peer:economize@optimizer=muon"], "optimizer may be muon, with speculators"),
        (["--arm", "a=recipe:quickstart.yaml@train.lrr=1"], "did you mean train.lr?"),
        (["--arm", "a=heads:x", "--at-least", "a=1"], "the arms behind the first are none"),
        (["--arm", "a=heads:x", "--decoded", "chain 7,tree 33"], "tree 33: budgets are chain 1, chain 2"),
        (["--arm", "a=heads:x", "--arm", "b=heads:y", "--at-least", "b"], "write NAME=TIMES, as in dflash=1.1"),
    ],
)
def test_what_cannot_be_compared_is_said(
    more: list[str], message: str, recipes: Path, in_process: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(recipes, *more)) == 2
    assert message in capsys.readouterr().err
    assert not (recipes / "out").exists() and not list(recipes.glob(".out*"))


def test_every_arm_takes_the_best_of_the_same_rates(
    recipes: Path, in_process: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worth = {"ours 0.01": 0.25, "ours 0.02": 0.75, "theirs 0.01": 0.5, "theirs 0.02": 0.125}
    monkeypatch.setattr(Judge, "worth", lambda self, name, folder, questions: worth[name] + 0 * len(questions[1].ids))
    own = ("--arm", f"named=recipe:{recipes}/recipe.yaml@train.lr=0.5")
    two = ("--arm", "theirs=peer:economize", "--arm", f"ours=recipe:{recipes}/recipe.yaml", *own)
    more = ("--rates", "0.01,0.02", "--rate-prompts", "2", "--temperatures", "0", "--checked", "1")
    assert main(words(recipes, *two, *more, "--at-least", "ours=1000")) == 1, "which is more than there is"
    report = json.loads((recipes / "out" / "report.json").read_text())
    arms = report["arms"]
    chosen = {name: [one["rate"] for one in arms[name]["rates"] if one["chosen"]] for name in ("ours", "theirs")}
    assert chosen == {"ours": [0.02], "theirs": [0.01]} and "rates" not in arms["named"]
    assert arms["ours"]["training"]["heads"] == f"{recipes}/runs/ours-0.02-6/heads"
    assert [one["accepted"] for one in arms["theirs"]["rates"]] == [0.5, 0.125]
    assert arms["ours"]["decoded"]["chain 7 T=0"]["prompts"] == 1 and arms["ours"]["greedy"]["chain 7"]["prompts"] == 3
    shown = capsys.readouterr().out
    assert "| ours | 0.02 | 0.750 | chosen, the highest tried |" in shown and "NO | 1000 times |" in shown
    assert report["at_least"]["ours"]["met"] == {"chain 7, T=0": False, "tree 32, T=0": False}


def test_prompts_that_were_decoded_are_not_decoded_again(
    recipes: Path, in_process: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, heat = ("--arm", f"ours=recipe:{recipes}/recipe.yaml"), ("--temperatures", "0,1")
    asked: list[str] = []
    whole = score_of.walk

    def walk(target: Target, drafter: object, question: Question, *rest: Any, **more: Any) -> Walk:
        asked.append(question.id)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return whole(target, drafter, question, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(score_of, "walk", walk)
    assert main(words(recipes, *one, *heat)) == 130
    assert not (recipes / "out").exists()
    stopped = next((recipes / "runs" / "scores").glob("ours-*.jsonl"))
    stopped.write_text(stopped.read_text() + '{"prompt": "half a l')
    assert main(words(recipes, *one, *heat)) == 0
    assert asked[3:] == [asked[2], *asked[:3], asked[0]], "the third, then both controls, one of them on one prompt"
    first = (recipes / "out" / "report.json").read_text()
    monkeypatch.setattr(score_of, "walk", whole)
    (recipes / "out").rename(recipes / "before")
    shutil.rmtree(recipes / "runs" / "scores")
    assert main(words(recipes, *one, *heat)) == 0
    arms = [json.loads(text)["arms"] for text in (first, (recipes / "out" / "report.json").read_text())]
    assert all(arm["ours"].pop("price")["parameters"] for arm in arms), "which is timed, so never twice the same"
    assert arms[0] == arms[1], "with and without a stop"


def test_prompts_of_the_sample_and_of_a_file(
    recipes: Path, in_process: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = recipes / "sample.jsonl"
    mine.write_text("\n".join(json.dumps({"prompt": f"sample {word}"}) for word in ("ab", "cd", "ef")))
    monkeypatch.setattr("train.compare.verb.sample", lambda: mine)
    one = ("--arm", f"ours=recipe:{recipes}/recipe.yaml", "--temperatures", "0", "--sample", "2")
    assert main(words(recipes, *one)) == 0
    report = json.loads((recipes / "out" / "report.json").read_text())
    assert [row["category"] for row in report["prompts"]] == ["sample", "sample", "a", "b", "a"]
    assert set(report["arms"]["ours"]["by_category"]["chain 7, T=0"]) == {"sample", "a", "b"}
    assert "| τ by category, tree 32, T=0 | ours |" in (recipes / "out" / "README.md").read_text()


def test_arms_that_saw_other_data_are_no_comparison(
    recipes: Path, in_process: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = arms_of.SOURCES["peer"]
    monkeypatch.setitem(arms_of.SOURCES, "peer", lambda arm, course: replace(whole(arm, course), tokens=1))
    two = ("--arm", f"ours=recipe:{recipes}/recipe.yaml", "--arm", "theirs=peer:economize", "--temperatures", "0")
    assert main(words(recipes, *two)) == 2
    assert "the arms did not see equally many tokens" in capsys.readouterr().err
