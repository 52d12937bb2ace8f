"""The comparison of cached and online training: real epochs both ways, and nothing left behind."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from train import commands
from train.speed import Speed
from train.speed_packing import PackingSpeed


def test_ratios_are_of_sums() -> None:
    found = Speed(tokens=100, online=[8.0, 8.0], cached=[1.0, 3.0], build=4.0).to_dict()
    assert (found["online_tokens_per_second"], found["cached_tokens_per_second"]) == (12.5, 50.0)
    assert (found["ratio"], found["ratio_with_build"]) == (4.0, 2.0)


def verb(words: list[str]) -> tuple[dict[str, Any], str]:
    """Run the verb as the command line would."""
    registered: dict[str, Any] = {}
    commands.register(lambda name, **parts: registered.update({name: parts}))
    found = registered["train-speed"]
    assert found["example"].startswith("headstart train-speed")
    parser = argparse.ArgumentParser()
    found["configure"](parser)
    report: tuple[dict[str, Any], str] = found["run"](parser.parse_args(words))
    return report


def test_the_verb_trains_both_ways(world: Path) -> None:
    words = ["--config", str(world / "recipe.yaml"), "--conversations", "6", "--epochs", "2"]
    report, text = verb([*words, "--set", "train.lr=1e-4"])
    assert report["epochs"] == 2 and report["tokens_per_epoch"] > 0
    assert min(report[key] for key in ("ratio", "ratio_with_build", "build_seconds")) > 0
    assert "tokens/s" in text and "online" in text
    assert not (world / "run").exists() and list((world / "cache").glob("*")) == []


def test_the_verb_trains_packed_and_padded(world: Path) -> None:
    words = ["--config", str(world / "recipe.yaml"), "--conversations", "6", "--epochs", "2", "--packing"]
    report, text = verb([*words, "--set", "train.bucket=1"])
    assert report["epochs"] == 2 and set(report["seconds"]) == {"padded", "packed"}
    assert all(len(times) == 2 and min(times) > 0 for times in report["seconds"].values())
    assert 0 <= report["padding"]["packed"] < report["padding"]["padded"] < 1
    assert "packed is" in text and f"{report['ratio']:.2f} times as fast" in text
    assert not (world / "run").exists() and list((world / "cache").glob("*")) == []


def test_packing_is_of_sums() -> None:
    seconds = {"padded": [3.0, 9.0], "packed": [2.0, 4.0]}
    found = PackingSpeed(tokens=60, places={"padded": 80, "packed": 64}, seconds=seconds).to_dict()
    assert found["ratio"] == 2.0 and found["tokens_per_second"] == {"padded": 5.0, "packed": 10.0}
    assert found["padding"] == {"padded": 0.25, "packed": 0.0625}


def test_wrong_numbers_and_settings(world: Path) -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        verb(["--config", str(world / "recipe.yaml"), "--epochs", "0"])
    with pytest.raises(ValueError, match=r"did you mean train\.lr\?"):
        verb(["--config", str(world / "recipe.yaml"), "--set", "train.lrr=1"])
