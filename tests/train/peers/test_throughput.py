"""The comparison as a user runs it: trial, rounds in turns, figures, checks; a peer's process sees little of ours."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.train.peers.conftest import contest_of
from train.peers import throughput
from train.peers.contest import CONTENDERS, HERE, Contender, Run
from train.peers.environments import PEERS
from train.peers.figures import best, summarize, table
from train.peers.inside.job import digest
from train.peers.meter import Metered


def run_of(contender: Contender, batch: int, seconds: float, peak: int = 1 << 30, frozen: Sequence[str] = ()) -> Run:
    """Four steps of 100 tokens, 60 of them supervised; the first two are not timed."""
    steps = [{"seconds": 50.0, "processor": 60.0, "tokens": 100, "supervised": 60}] * 2
    steps += [{"seconds": seconds, "processor": 2 * seconds, "tokens": 100, "supervised": 60}] * 2
    result = {"steps": steps, "frozen": frozen, "versions": {"torch": "2"}}
    return Run(contender, batch, Metered(9.0, 8.0, peak), result, Path("out"))


def test_figures_are_of_timed_steps_and_the_middle_round() -> None:
    ours, economize, online, speculators = CONTENDERS
    runs = [run_of(ours, 64, seconds) for seconds in (0.5, 0.25, 0.2)]
    runs += [run_of(economize, 32, 2.0, 3 << 30), run_of(economize, 32, 1.0), run_of(economize, 32, 4.0)]
    runs += [run_of(online, 64, 1.0), run_of(speculators, 16, 0.8, frozen=["lm_head.weight"])]
    report = summarize(runs, cached_build=7.0)
    rows = report["trainers"]
    assert rows["headstart, cached"]["tokens_per_second"] == 400.0 == 100 / 0.25
    assert rows["headstart, cached"]["rounds"] == [200.0, 400.0, 500.0]
    assert rows["economize, online"]["tokens_per_second"] == 50.0 and rows["economize, online"]["peak_bytes"] == 3 << 30
    assert rows["economize, online"]["supervised_per_second"] == 30.0
    assert rows["economize, online"]["tokens_per_processor_second"] == 25.0
    assert report["better_peer"] == "speculators, cached"
    assert report["ratios"] == {"headstart, cached": 3.2, "headstart, online": 0.8}
    shown = table(report)
    assert "headstart, cached: 3.20 times the better peer (speculators, cached)" in shown and "200 to 500" in shown
    assert "speculators, cached leaves lm_head.weight as it is" in shown and shown.count("as it is") == 1
    assert best([run_of(ours, 8, 0.5), run_of(ours, 16, 0.2), run_of(ours, 32, 0.4)]) == 16


def words(world: Path, *more: str) -> list[str]:
    named = ["--python", "economize=here", "--python", "speculators=there", "--work", str(world / "work")]
    return ["--config", str(world / "recipe.yaml"), "--conversations", "10", "--rounds", "2", *named, *more]


def test_all_train_in_turns_and_are_compared(
    world: Path, in_process: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tuple(Contender(one.name, one.peer, one.features, (40, 80, 10_000)) for one in CONTENDERS)
    monkeypatch.setattr(throughput, "CONTENDERS", small)
    fixed = ("--trial-tokens", "40", "--batch", "headstart=40", "--json", str(world / "out.json"), "--at-least", "0")
    assert throughput.main(words(world, *fixed, "--set", "train.lr=1e-4")) == 0
    ran = [Path(command[3]).parent.name[4:] for command in in_process]
    tried = ["economize-online-40", "economize-online-80", "speculators-cached-40", "speculators-cached-80"]
    assert ran[:4] == tried
    order = [name.rpartition("-")[0] for name in ran[4:]]
    first = ["headstart-cached", "economize-online", "headstart-online", "speculators-cached"]
    assert order == [*first, *first[1:], first[0]], "each round begins with another"
    report = json.loads((world / "out.json").read_text())
    assert list(report["trainers"]) == [one.name for one in small] and report["made"]["lookahead"] == 3
    rows = report["trainers"].values()
    assert {row["tokens"] for row in rows} == {report["tokens"]} and report["conversations"] == 10
    assert {row["supervised"] for row in rows} == {report["supervised"]} and report["cache_build_seconds"] > 0
    told = capsys.readouterr()
    assert "times the better peer" in told.out
    same = f"10 conversations, {report['tokens']:,} tokens, {report['supervised']:,} of them supervised; EAGLE-3 of "
    assert same in told.out and "unroll depth 3, draft vocabulary 100;" in told.out
    assert "economize, online: too few --conversations to try 10,000 tokens a step" in told.out + told.err


def test_falling_short_is_an_answer_of_no(world: Path, in_process: list[list[str]]) -> None:
    fixed = ("--batch", "headstart=80", "--batch", "economize=80", "--only", "headstart", "--only", "economize")
    assert throughput.main(words(world, *fixed, "--rounds", "1", "--at-least", "1e9")) == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--only", "vllm"), "--only vllm: trainers are headstart, economize, speculators"),
        (("--batch", "vllm=3"), "--batch vllm=3: NAME is one of headstart, economize, speculators"),
        (("--batch", "economize"), "and needs a value"),
        (("--rounds", "0"), "must be 1 or more"),
        (("--set", "train.lrr=1"), "did you mean train.lr?"),
        (("--json", "no/such/folder.json"), "does not exist, make it first"),
        (("--trial-tokens", "8"), "steps of 1024 tokens are too few: name more --conversations"),
    ],
)
def test_what_cannot_be_measured_is_said(
    more: tuple[str, ...], message: str, world: Path, in_process: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert throughput.main(words(world, *more)) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_peers_process_is_a_fresh_one_that_sees_its_own_folder(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python of the peer's that only notes how it was started, and hands back a result made before."""
    contest = contest_of(world)
    contender, texts = CONTENDERS[1], contest.handover.conversations
    steps = contest.plan(40)
    whole = digest([(texts.ids(i), texts.loss_mask(i)) for i in step] for step in steps)
    result: dict[str, Any] = {"data": whole, "steps": [{"seconds": 1.0}] * len(steps), "made": contest.wanted}
    (world / "result.json").write_text(json.dumps(result))
    python = world / "python"
    python.write_text(
        f'#!/bin/sh\nenv > {world}/env\necho "$@" > {world}/words\ncp {world}/result.json "$(dirname "$3")"\n'
    )
    python.chmod(0o755)
    contest.pythons["economize"] = python
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    done = contest.run(contender, 40, steps)
    assert done.result == result and done.process.seconds > 0
    job = world / "runs" / "001-economize-online-40" / "job.json"
    assert (world / "words").read_text().split() == ["-m", "inside.economize", str(job)]
    seen = dict(line.partition("=")[::2] for line in (world / "env").read_text().splitlines())
    assert (seen["PYTHONPATH"], seen["PYTHONSAFEPATH"]) == (str(HERE), "1") and "ACCELERATE_USE_CPU" not in seen
    assert seen["OMP_NUM_THREADS"] == str(contest.threads) and seen["PATH"] == os.environ["PATH"]
    assert json.loads(job.read_text())["states"] == "", "it runs the target itself"
    assert {peer.module for peer in PEERS.values()} == {"inside.economize", "inside.speculators"}
