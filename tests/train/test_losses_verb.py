"""``headstart losses``: one recipe for each loss, a table and the same as JSON, and what is there is not done again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headstart import main
from tests.train.conftest import _reset
from tests.train.world import log_of

MIXED = "hard_ce=0.1,tv=1.8"


def verb(world: Path, *arguments: str) -> int:
    _reset()
    words = ["--config", str(world / "recipe.yaml"), "--steps", "3", "--out", str(world / "out")]
    return main(["losses", *words, "--json", str(world / "out.json"), *arguments])


def table(shown: str) -> list[str]:
    lines = shown.splitlines()
    return lines[next(at for at, line in enumerate(lines) if line.startswith("loss ")) :]


def figures(row: dict[str, Any]) -> dict[str, Any]:
    """All but its name and the clock."""
    return {name: value for name, value in row.items() if name not in ("loss", "seconds")}


def test_the_table_and_the_report(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # one loss under two names: whatever else differs between the rows is a fault
    names = ["soft_ce", MIXED, "soft_ce=1.0"]
    assert verb(world, *(word for name in names for word in ("--loss", name)), "--set", "train.lr=1e-2") == 0
    told = capsys.readouterr()
    report = json.loads((world / "out.json").read_text())
    rows = report.pop("rows")
    assert report == {
        "target": str(world / "target"),
        "kind": "eagle",
        "max_steps": 3,
        "epochs": 1,
        "batch_tokens": 160,
        "lr": 0.01,
        "seed": 0,
    }
    assert [row["loss"] for row in rows] == names
    assert figures(rows[0]) == figures(rows[2]) != figures(rows[1])
    for row in rows:
        assert list(row) == ["loss", "acceptance", "overlap", "tokens_per_round", "loop_free", "rounds", "seconds"]
        assert len(row["acceptance"]) == len(row["overlap"]) == 3
        assert all(0 <= value <= 1 for value in row["acceptance"] + row["overlap"])
        assert row["acceptance"] == sorted(row["acceptance"], reverse=True), "joint: here and at all earlier positions"
        assert 1 <= row["tokens_per_round"] <= 4 and row["rounds"] >= 6
    lines = table(told.out)
    assert re.sub(" +", " ", lines[0]) == "loss accepted overlap τ loop-free rounds seconds"
    for line, row in zip(lines[1:], rows, strict=True):
        said = [f"{value:.3f}" for value in (*row["acceptance"], *row["overlap"], row["tokens_per_round"])]
        assert line.split()[:-3] == [row["loss"], *said]
        assert line.split()[-2:] == [str(row["rounds"]), f"{row['seconds']:.1f}"]
    # each in a folder of its own, trained with that loss and for that long
    folders = {name: world / "out" / name.replace(",", "+") for name in names}
    terms = {
        name: {key.split("/")[1] for key in log_of(folder)[0] if key.endswith("/1")} for name, folder in folders.items()
    }
    assert "soft_ce" in terms["soft_ce"] and {"hard_ce", "tv"} <= terms[MIXED] and "soft_ce" not in terms[MIXED]
    assert [line["step"] for line in log_of(folders[MIXED]) if "train/loss" in line] == [1, 2, 3]


def test_what_is_there_is_read_and_not_trained_again(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb(world, "--loss", "tv", "--set", "eval.prompts=0") == 0
    first = json.loads((world / "out.json").read_text())
    log = (world / "out" / "tv" / "log.jsonl").read_bytes()
    capsys.readouterr()
    assert verb(world, "--loss", "tv", "--set", "eval.prompts=0") == 0
    told = capsys.readouterr()
    again = json.loads((world / "out.json").read_text())
    assert figures(again["rows"][0]) == figures(first["rows"][0])
    assert "resumed: step 3 of 3" in told.err and (world / "out" / "tv" / "log.jsonl").read_bytes() == log
    assert first["rows"][0]["tokens_per_round"] is None
    assert table(told.out)[1].split()[-4:-1] == ["–", "–", "–"], "nothing was decoded, so nothing is said of it"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--loss", "soft_c"], "soft_c"),
        (["--loss", "tv=much"], "--loss tv=much: 'much' is no weight"),
        (["--set", "eval.conversations=0"], "eval.conversations is 0: losses are compared on held-out conversations"),
        (["--set", "train.lerning_rate=1"], "did you mean train.lr?"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    arguments: list[str], message: str, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verb(world, *arguments) == 2
    assert message in capsys.readouterr().err
    assert not (world / "out").exists() and not (world / "out.json").exists()
