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
from tests.data.chat_server import said, serving
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
    assert text.splitlines()[:6] == [
        "rows read           3",
        "kept: train         1",
        "refused             2",
        "  no answer         1",
        "  row is no object  1",
        "  rows:2: the conversation has no assistant's turn that follows a user's",
    ]
    assert "rows:3: the row is str" in text
    assert "1 sequences, 8 tokens, 3 of them learned" in text
    assert "reused" in call("prepare", str(source), "--out", str(tmp_path / "out"))[1]


@pytest.mark.parametrize(("flag", "ok"), [("--strict", False), ("--no-strict", True)])
def test_strict_says_no_when_a_row_was_refused_or_a_turn_taken_away(tmp_path: Path, flag: str, ok: bool) -> None:
    refused = write_jsonl(tmp_path / "refused", [{"messages": chat("hi", "ok")}, "x"])
    orphaned = write_jsonl(tmp_path / "orphaned", [{"messages": [*chat("x", "orphan")[1:], *chat("hi", "ok")]}])
    clean = write_jsonl(tmp_path / "clean", [{"messages": chat("hi", "ok")}])
    for source, wanted in ((refused, ok), (orphaned, ok), (clean, True)):
        for _ in range(2):  # made, and found again
            report, _ = call("prepare", str(source), "--out", str(tmp_path / f"out-{source.stem}" / "a" / flag), flag)
            assert (report["ok"], report["kept"]) == (wanted, {"train": 1})


def test_names_of_roles_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_jsonl(tmp_path / "rows", [{"messages": [*chat("hi"), {"role": "laguna_s", "content": "ok"}]}])
    with pytest.raises(ValueError, match="name what it is with --role laguna_s=ROLE"):
        call("prepare", str(source), "--out", str(tmp_path / "out"))
    report, _ = call("prepare", str(source), "--out", str(tmp_path / "out"), "--role", "laguna_s=assistant")
    assert report["kept"] == {"train": 1}
    with pytest.raises(SystemExit):
        call("prepare", str(source), "--out", str(tmp_path / "out"), "--role", "laguna_s=narrator")
    assert "NAME=ROLE" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        call("prepare", str(source), "--out", str(tmp_path / "out"), "--role", "=assistant")
    assert "NAME=ROLE" in capsys.readouterr().err


def test_inspect_marks_what_is_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"id": i, "messages": chat("hi", text)} for i, text in enumerate(("ok", "no"))]
    source = str(write_jsonl(tmp_path / "rows", rows))
    report, text = call("inspect", source, "--count", "2")
    assert text.splitlines()[0] == "learned tokens stand between ⟦ and ⟧"
    assert "0: 8 tokens, 3 learned\n[U]hi[E][A]⟦ok[E]⟧" in text
    assert [one["id"] for one in report["sequences"]] == ["0", "1"]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    report, text = call("inspect", source, "--skip", "1", "--max-length", "6")
    assert text == "1: 6 tokens, 1 learned\n[U]hi[E][A]\x1b[1;32mn\x1b[0m"
    with pytest.raises(ValueError, match="no more than 2 sequences"):
        call("inspect", source, "--skip", "2")


def test_inspecting_what_cannot_be_read_is_no_success(tmp_path: Path) -> None:
    bad: dict[str, Any] = {"messages": []}
    source = str(write_jsonl(tmp_path / "rows", [bad, bad, {"id": "good", "messages": chat("hi", "ok")}]))
    report, text = call("inspect", source, "--count", "2")
    assert report["ok"] is False and "refused" in text
    assert call("inspect", source, "--count", "3")[0]["ok"] is True


def test_a_missing_source_is_said_before_the_target_is_loaded(tmp_path: Path) -> None:
    verbs = Verbs()

    def engine(*_: Any) -> Any:
        raise AssertionError("the target was loaded")

    register(verbs.add, engine)
    words = ["data", "regenerate", str(tmp_path / "missing.jsonl"), "--out", str(tmp_path / "out")]
    args = verbs.parser.parse_args(words)
    with pytest.raises(FileNotFoundError, match=r"missing\.jsonl"):
        args.run(args)
    assert not (tmp_path / "out").exists()


def test_regenerate_with_the_engine(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows", [{"id": 1, "messages": chat("hi", "old")}, {"text": "t"}])
    options = [str(source), "--out", str(tmp_path / "out"), "--max-answer-tokens", "9"]
    report, text = call("regenerate", *options)
    assert (report["whole"], report["dropped"], report["ok"]) == (1, {"no question": 1}, True)
    assert "written to" in text
    (row,) = (json.loads(line) for line in Path(report["file"]).read_text().splitlines())
    assert row["messages"] == chat("hi", "HI")
    assert call("regenerate", *options, "--strict")[0]["ok"] is False
    assert call("regenerate", *options)[0]["there"] == 1


def test_regenerate_with_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is the one that the server has, and the key comes from the environment and stays there."""
    monkeypatch.setenv("MY_KEY", "secret-key")
    source = write_jsonl(tmp_path / "rows", [{"messages": chat("hi", "old")}])
    with serving(lambda body: said(body["model"])) as server:
        options = ["--server", server.url, "--api-key-env", "MY_KEY", "--concurrency", "2", "--retry-failed"]
        report, text = call("regenerate", str(source), "--out", str(tmp_path / "out"), *options)
    assert server.keys == ["Bearer secret-key"]
    settings = json.loads((tmp_path / "out" / "regeneration.json").read_text())["settings"]
    assert settings == {"model": "toy", "max_answer_tokens": 512, "temperature": 0.0, "seed": 0}
    everything = "".join(path.read_text() for path in (tmp_path / "out").iterdir()) + text + json.dumps(report)
    assert "secret-key" not in everything
    with pytest.raises(ValueError, match="--concurrency is 0"):
        call("regenerate", str(source), "--out", str(tmp_path / "out"), "--server", "x", "--concurrency", "0")


def test_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="--chunk is 0"):
        call("synthesize", "--out", str(tmp_path / "out"), "--chunk", "0")
    for amount in ("1.5", "-1", "some", "inf", "nan"):
        with pytest.raises(SystemExit):
            call("prepare", "x", "--out", "y", "--heldout", amount)
        assert "--heldout" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("regenerate", "SOURCE", "--server", "http://h/v1", "--model", "m", "--retries", "-1"), "--retries is -1, it"),
        (("regenerate", "SOURCE", "--server", "http://h/v1", "--timeout", "0"), "--timeout is 0, it must be above 0"),
        (("regenerate", "SOURCE", "--timeout", "nan"), "--timeout is nan, it must be above 0"),
        (("regenerate", "SOURCE", "--temperature", "-1"), "--temperature is -1, it must be 0 or more"),
        (("synthesize", "--prompt-temperature", "inf"), "--prompt-temperature is inf, it must be 0 or more"),
        (("synthesize", "--conversations", "5", "--heldout", "5"), "5 of 5 conversations cannot be held out"),
        (("prepare", ""), "the name of a data file is empty"),
        (("prepare", "SOURCE", "--out", "/"), "/ cannot be the folder of prepared data"),
    ],
)
def test_numbers_and_names_that_cannot_be(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    """Before anything is loaded, asked or written."""
    source = write_jsonl(tmp_path / "rows", [{"messages": chat("hi", "ok")}])
    words = tuple(str(source) if word == "SOURCE" else word for word in words)
    with pytest.raises(ValueError, match=message):
        call(*words, *(() if "--out" in words else ("--out", str(tmp_path / "out"))))
    with pytest.raises(ValueError, match="--skip is -1, it must be 0 or more"):
        call("inspect", str(source), "--skip", "-1")
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


def test_progress_in_a_log_is_sparse(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    for done in range(1, 101):
        progress("answers", done, 100)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0] == "answers 1/100"
    assert lines[1].startswith("answers 100/100, ")
