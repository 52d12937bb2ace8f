"""The serving check from heads to its report, with a stand-in for the engine; and how the real one is started."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.base import DraftHeads
from heads.target import Target
from infer import evaluate
from infer.prompts import read_prompts
from tests.data import toys
from tests.heads.small import batch_of, soft_ce
from tests.hub.world import heads_on, save_target
from tests.serving import check, engine, standin
from tests.serving.resume import digest, resumed
from train.settings import load

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``eagle`` and ``medusa`` heads of one target, and the prompts on whose answers they were trained."""
    folder = tmp_path_factory.mktemp("world")
    target = Target.load(str(save_target(folder / "target", layers=8)), dtype=torch.float32)
    rows = [{"messages": toys.chat(f"say {n}", "no")} for n in range(3)]
    toys.write_jsonl(folder / "prompts.jsonl", rows)
    asked = evaluate.ask(read_prompts(folder / "prompts.jsonl"), target.tokenizer())
    texts = [target.model.generate(question.ids, max_new_tokens=24, do_sample=False) for question in asked]
    kinds: dict[str, dict[str, Any]] = {"eagle": {"taps": (2, 4, 5)}, "medusa": {}}
    for kind, settings in kinds.items():
        made = heads_on(target, kind, **settings)
        learn(made, target, texts)
        made.save_pretrained(folder / kind)
    return folder


def learn(heads: DraftHeads, target: Target, texts: list[Tensor]) -> None:
    """Some of the texts by heart, so that drafts are accepted now and then."""
    batches = [batch_of(target, heads.config.taps, ids) for ids in texts]
    optimizer = torch.optim.Adam([p for p in heads.parameters() if p.requires_grad], lr=3e-3)
    for step in range(60):
        report = heads.loss(batches[step % len(batches)], soft_ce)
        optimizer.zero_grad()
        (report.total / report.count).backward()
        optimizer.step()


@pytest.fixture(scope="module")
def decoded() -> dict[str, dict[str, Any]]:
    """What the engine found, by its job: each is done once."""
    return {}


Change = Callable[[dict[str, Any]], None]
Run = Callable[..., int]


@pytest.fixture
def run(world: Path, decoded: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The check's exit status; ``change`` spoils what the engine found with a draft."""

    def started(*words: str, change: Change | None = None) -> int:
        def serve(python: Path, folder: Path, job: dict[str, Any]) -> dict[str, Any]:
            key = json.dumps(job)
            found = copy.deepcopy(decoded.setdefault(key, decoded.get(key) or engine.decode(job)))
            if change is not None and job["speculative"] is not None:
                change(found)
            return found

        monkeypatch.setitem(sys.modules, "vllm", standin)
        monkeypatch.setattr(check, "serve", serve)
        monkeypatch.setattr(check, "sample", lambda: world / "prompts.jsonl")
        places = ["--eagle", str(world / "eagle"), "--medusa", str(world / "medusa"), "--out", str(world / "out")]
        return check.main([*places, "--python", sys.executable, "--max-new-tokens", "24", "--rounds", "15", *words])

    return started


def test_exports_are_served_as_here(run: Run, world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    report = json.loads((world / "out" / "report.json").read_text())
    assert report["ok"] and not report["full"] and list(report["exports"]) == list(check.EXPORTS)
    flat, speculators, medusa = report["exports"].values()
    assert flat == speculators and 0.2 < flat["accepted"][0] < 1 and medusa["accepted"][0] > 0
    assert [found["texts"] for found in report["exports"].values()] == [3, 3, 2], "fewer for Medusa"
    for found in report["exports"].values():
        assert found["different"] == found["our_texts_different"] == [] and found["apart"] == 0
        assert found["same_accepted"] == found["same_place"] == found["rounds"] >= 15, "the very same drafts"
    assert capsys.readouterr().out.endswith("as it must be (fewer than 2000 rounds: a trial, not the check)\n")


def _another_token(found: dict[str, Any]) -> None:
    found["tokens"][1][7] += 1


def _fewer_accepted(found: dict[str, Any]) -> None:
    found["steps"] = [[1] * len(tokens) for tokens in found["tokens"]]
    found["drafts"] = sum(len(steps) - 1 for steps in found["steps"])


@pytest.mark.parametrize(("change", "told"), [(_another_token, "2/3"), (_fewer_accepted, "FAILED")])
def test_what_differs_fails(change: Change, told: str, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--exports", "eagle3 flat", change=change) == 1
    shown = capsys.readouterr().out
    assert told in shown and "NOT AS IT MUST BE" in shown


def test_too_few_rounds_fail(run: Run) -> None:
    assert run("--exports", "medusa", "--rounds", "5000") == 1


def test_what_was_decoded_is_kept_for_the_same_job_alone(tmp_path: Path) -> None:
    (tmp_path / "heads").mkdir()
    weights = tmp_path / "heads" / "heads.safetensors"
    done: list[str] = []

    def asked(resume: bool, said: str, fails: bool = False) -> dict[str, Any]:
        def work() -> dict[str, Any]:
            done.append(said)
            return {"tokens": 1 // (not fails), "said": said}

        return resumed(resume, tmp_path / "run", {"prompts": [[1]], "digest": digest(tmp_path / "heads")}, work)

    weights.write_bytes(b"some")
    assert asked(True, "first") == asked(True, "not again") == {"tokens": 1, "said": "first"}
    assert asked(False, "not resumed")["said"] == "not resumed"
    weights.write_bytes(b"others")
    with pytest.raises(ZeroDivisionError):
        asked(True, "stopped", fails=True)
    assert asked(True, "other weights")["said"] == "other weights", "nothing is kept of what was stopped"
    assert done == ["first", "not resumed", "stopped", "other weights"]


def interpreter(folder: Path, script: str) -> Path:
    """An environment's python that does something else."""
    (folder / "bin").mkdir()
    python = folder / "bin" / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return python


def test_the_engine_is_a_process_of_its_own_that_asks_nobody(tmp_path: Path) -> None:
    script = 'echo "$1 $HF_HUB_OFFLINE $VLLM_NO_USAGE_STATS $LD_PRELOAD"; cp "$2" "$3"'
    python = interpreter(tmp_path, script)
    job = {"model": "m", "speculative": None, "prompts": [[1, 2]]}
    assert check.serve(python, tmp_path / "run", job) == job
    log = (tmp_path / "run" / "log.txt").read_text()
    assert f"{ROOT}/tests/serving/engine.py 1 1 {tmp_path}/lib/libiomp5.so" in log


def test_an_engine_that_fails_tells_why(tmp_path: Path) -> None:
    python = interpreter(tmp_path, "seq 30; echo 'no such model'; exit 3")
    with pytest.raises(OSError, match=r"vLLM failed \(3\); the end of .*log\.txt:\n(.*\n)*no such model") as problem:
        check.serve(python, tmp_path / "run", {"speculative": None})
    assert "\n3\n" not in str(problem.value), "the end alone"


def test_make_has_all_that_the_check_needs() -> None:
    """Every file that its recipe names is there, and the heads it trains when there are none are asked for rightly."""
    done = subprocess.run(["make", "-n", "-B", "serve-check"], cwd=ROOT, capture_output=True, text=True, check=True)
    named = set(re.findall(r"(?<![\w/.$-])[\w/]+\.(?:py|yaml|txt)\b", done.stdout)) - {"requirements.txt"}
    assert {"tests/serving/requirements.py", "train/train_heads.py", "configs/medusa.yaml"} <= named
    assert all((ROOT / name).is_file() for name in named), named
    (words,) = re.findall(r"train_heads.py --config configs/medusa.yaml\s*\\\s*(--.*)", done.stdout)
    recipe = load(ROOT / "configs" / "medusa.yaml", words.split())
    assert (recipe.heads.kind, recipe.heads.draft_vocab_size) == ("medusa", None), "this engine loads no reduced one"
    assert "-m tests.serving.check --eagle runs/quickstart/heads --medusa runs/medusa-whole/heads" in done.stdout
