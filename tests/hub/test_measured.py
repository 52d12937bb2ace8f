"""A card from what the verbs themselves wrote: measured, certified, pushed, and every figure of theirs is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.target import Target
from headstart import main
from tests.data import toys
from tests.hub.server import TOKEN, Hub
from tests.hub.world import heads_on, save_target

REPO = "org/heads"


@pytest.fixture
def world(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A target, heads and prompts of two tasks in this folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    target = Target.load(str(save_target(tmp_path / "target")), dtype=torch.float32)
    heads_on(target).save_pretrained(tmp_path / "heads")
    rows = [{"messages": toys.chat(f"say {n}", "no"), "category": task} for n, task in enumerate(["writing", "coding"])]
    toys.write_jsonl(tmp_path / "prompts.jsonl", rows)
    return hub


def read(name: str) -> dict[str, Any]:
    return dict(json.loads(Path(name).read_text()))


def test_what_was_measured_stands_in_the_card(world: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["heads", "--prompts", "prompts.jsonl", "--max-new-tokens", "8"]
    assert main(["eval", *asked, "--rows", "8", "--json", "eval.json"]) == 0
    assert main(["bench", *asked, "--warmup", "1", "--theirs", "none", "--json", "bench.json"]) == 0
    certify = ["--prompts-count", "1", "--draws", "12", "--top-k", "3"]
    assert main(["verify", *asked, *certify]) in (0, 1)  # so few draws prove nothing of the law
    reports = ["--report", "eval.json", "--report", "bench.json"]
    assert main(["push", "heads", REPO, "--target-name", "org/target", *reports, "--data-license", "mit"]) == 0

    files = world.files(REPO)
    assert {"plots/acceptance.png", "plots/tasks.png", "plots/speed.png", "certificate.json"} <= files.keys()
    card = files["README.md"].decode()
    evaluated, timed, certificate = read("eval.json"), read("bench.json"), read("heads/certificate.json")
    assert evaluated["heads_sha256"] == timed["heads_sha256"] == certificate["heads"]["sha256"]
    for name, budget in evaluated["budgets"].items():
        assert f"| {name} | {budget['rows']} | {budget['rounds']} | " in card
        assert f"| {name} | " + " | ".join(f"{share:.1%}" for share in budget["accepted_per_position"]) in card
        assert set(budget["by_category"]) == {"writing", "coding"}
    assert "| writing | 1 | " in card and "| coding | 1 | " in card
    assert f"Speed-up over the faster baseline ({timed['baseline']}): **{timed['speedup']:.2f}**" in card
    assert timed["settings"]["machine"] in card and "bfloat16" in card
    for arm, found in timed["arms"].items():
        assert f"| {arm} | {found['tokens_per_second']:.1f} | " in card
    exact = certificate["greedy"]["float32"]
    assert f"| greedy, float32 | {exact['texts']} texts, {exact['positions']} tokens: no difference |" in card
    assert "wrong rule on purpose" in card and f"torch {torch.__version__}" in card
    assert "| data | mit |" in card and str(Path.cwd()) not in card + files["certificate.json"].decode()


def test_heads_trained_again_do_not_get_their_old_figures(world: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["heads", "--prompts", "prompts.jsonl", "--max-new-tokens", "4", "--rows"]
    assert main(["eval", *asked, "--json", "eval.json"]) == 0
    heads_on(Target.load("target", dtype=torch.float32), seed=1).save_pretrained("heads")
    assert main(["push", "heads", REPO, "--target-name", "org/target", "--report", "eval.json"]) == 2
    assert "the evaluation report is of other weights" in capsys.readouterr().err and world.repos == {}
