"""The verbs from the command line, with an engine in place of the target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data.commands import TARGET, register
from data.prepare import load
from data.progress import Progress
from heads.embedded import NAME
from headstart import Verbs
from tests.data import toys
from tests.data.test_synthesize import PROMPTS_DRAWN, Script
from tests.data.toys import chat, write_jsonl


def call(*words: str) -> tuple[dict[str, Any], str]:
    verbs = Verbs()
    tokenizer = toys.tokenizer()
    register(verbs.add, lambda *_: (Script(tokenizer, PROMPTS_DRAWN), tokenizer), weights=lambda _: "abc")
    args = verbs.parser.parse_args(["data", *words])
    return args.run(args)


def test_the_default_target_is_the_embedded_one() -> None:
    assert TARGET == NAME


def test_synthesize_then_prepare(tmp_path: Path) -> None:
    out = tmp_path / "out"
    report, text = call(
        "synthesize",
        "--out",
        str(out),
        "--conversations",
        "5",
        "--chunk",
        "4",
        "--heldout",
        "2",
        "--max-answer-tokens",
        "9",
    )
    assert (report["conversations"], report["unfinished"], report["prompts_dropped"]["duplicate"]) == (5, 2, 2)
    assert (report["shared"]["train"], report["shared"]["heldout"]) == (3, 2)
    assert "5 conversations" in text
    assert "2 duplicate" in text
    provenance = json.loads((out / "provenance.json").read_text())
    assert provenance["engine"] == {"dtype": "bfloat16", "batch_size": 128, "weights": "abc"}
    assert provenance["settings"]["conversations"] == 5
    again, _ = call(*provenance["command"].replace("OUT", str(tmp_path / "again")).split()[2:])
    assert again["shared"] == report["shared"]
    for name in ("train.jsonl.gz", "heldout.jsonl.gz"):
        assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes()
    report, text = call("prepare", str(out / "train.jsonl.gz"), "--out", str(tmp_path / "prepared"))
    assert report["kept"] == {"train": 3}
    assert len(load(report["out"])) == 3
    assert "3 rows → 3 train" in text


def test_prepare_says_what_was_dropped(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows", [{"messages": chat("hi", "ok")}, {"messages": chat("hi")}, "x"])
    report, text = call("prepare", str(source), "--out", str(tmp_path / "out"))
    assert report["dropped"] == {"no answer": 1, "row is no object": 1}
    assert "dropped: 1 no answer, 1 row is no object" in text
    assert "rows:3: the row is str" in text
    assert "reused" in call("prepare", str(source), "--out", str(tmp_path / "out"))[1]


def test_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="--chunk is 0"):
        call("synthesize", "--out", str(tmp_path / "out"), "--chunk", "0")
    for amount in ("1.5", "-1", "some"):
        with pytest.raises(SystemExit):
            call("prepare", "x", "--out", "y", "--heldout", amount)
        assert "--heldout" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_progress_in_a_log_is_sparse(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    for done in range(1, 101):
        progress("answers", done, 100)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0] == "answers 1/100"
    assert lines[1].startswith("answers 100/100, ")
