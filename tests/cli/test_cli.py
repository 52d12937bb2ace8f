"""The command line: each verb explains itself, fails in one line, and writes its report whole or not at all."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

import headstart

VERBS = [
    "data synthesize",
    "data prepare",
    "data regenerate",
    "data inspect",
    "train",
    "quickstart",
    "train-speed",
    "losses",
    "compare",
    "eval",
    "bench",
    "plan",
    "stability",
    "verify",
    "generate",
    "push",
    "bundle",
    "export",
    "import",
    "merge",
]


def test_help_lists_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        headstart.main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert all(verb.split()[0] in shown for verb in VERBS)
    assert "example:" in shown


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_each_verb_shows_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        headstart.main([*verb.split(), "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "--json FILE" in shown
    assert f"headstart {verb}" in shown.split("example:")[1]


def test_every_verb_is_in_this_list() -> None:
    def leaves(parser: argparse.ArgumentParser, prefix: str = "") -> list[str]:
        groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        found = [f"{prefix}{name}" for group in groups for name in group.choices]
        below = [group.choices for group in groups]
        inner = [leaf for choices in below for name, sub in choices.items() for leaf in leaves(sub, f"{prefix}{name} ")]
        return [name for name in found if not any(leaf.startswith(f"{name} ") for leaf in inner)] + inner

    assert sorted(leaves(headstart.verbs().parser)) == sorted(VERBS)


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "error: the following arguments are required: VERB (see `headstart --help`)"),
        (["nonsense"], "error: argument VERB: invalid choice: 'nonsense'"),
        (["push", "folder"], "error: the following arguments are required: repo_id (see `headstart push --help`)"),
    ],
)
def test_wrong_usage_is_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        headstart.main(argv)
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1


def test_bad_input_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert headstart.main(["push", str(tmp_path), "org/name"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path} has no config.json")
    assert error.count("\n") == 1


def run_with(result: object, monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> int:
    """Run a verb of the test's own whose ``run`` returns ``result``, or raises it."""

    def run(args: argparse.Namespace) -> headstart.Report:
        if isinstance(result, BaseException):
            raise result
        assert isinstance(result, dict)
        return result, "text for people"

    verbs = headstart.Verbs()
    verbs.add("probe", help="probe", example="headstart probe", configure=lambda parser: None, run=run)
    monkeypatch.setattr(headstart, "verbs", lambda: verbs)
    return headstart.main(["probe", *argv])


def test_report_is_shown_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    report = {"n": 1, "none": math.nan, "folder": tmp_path, "rows": [(1.5, math.inf)], "text": "é"}
    assert run_with(report, monkeypatch, ["--json", str(file)]) == 0
    assert json.loads(file.read_text(encoding="utf-8")) == {
        "n": 1,
        "none": None,
        "folder": str(tmp_path),
        "rows": [[1.5, None]],
        "text": "é",
    }
    assert capsys.readouterr().out == "text for people\n"
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_an_answer_of_no_is_status_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    assert run_with({"ok": False}, monkeypatch, ["--json", str(file)]) == 1
    assert json.loads(file.read_text()) == {"ok": False}


@pytest.mark.parametrize(
    "raised, status, line",
    [
        (ValueError("what was wrong,\n  where"), 2, "error: what was wrong, where\n"),
        (OSError("disk full"), 2, "error: disk full\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
    ],
)
def test_failures(
    raised: BaseException,
    status: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_with(raised, monkeypatch, ["--json", str(tmp_path / "report.json")]) == status
    assert capsys.readouterr().err == line
    assert list(tmp_path.iterdir()) == []


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError):
        run_with(KeyError("a bug"), monkeypatch, [])


def test_unwritable_json_is_said_before_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_with(AssertionError("must not run"), monkeypatch, ["--json", str(tmp_path / "no" / "r.json")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert run_with(AssertionError("must not run"), monkeypatch, ["--json", str(tmp_path)]) == 2
    assert "is a folder: name a file in it" in capsys.readouterr().err


def test_failed_write_leaves_the_old_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    file.write_text("old")

    def full(self: Path, *args: object, **kwargs: object) -> int:
        with open(self, "w") as half:
            half.write("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert run_with({"n": 1}, monkeypatch, ["--json", str(file)]) == 2
    assert "No space left" in capsys.readouterr().err
    assert file.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_a_folder_that_hides_a_package_is_named(tmp_path: Path) -> None:
    """``python -m`` and PYTHONPATH put other folders first; a user's own train.py must not be run for ours."""
    (tmp_path / "train.py").write_text("raise SystemExit('the wrong train')\n")
    command = [sys.executable, "-c", "import sys, headstart; sys.exit(headstart.main(['push', '--help']))"]
    path = f"{tmp_path}:{headstart.HERE}"
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert f"{tmp_path / 'train.py'} hides Headstart's own package 'train'" in done.stderr


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none", None, "there is no folder {0}, and it is no Hub id (ORG/NAME) either"),
        ("file", "", "there is no folder {0}, and it is no Hub id (ORG/NAME) either"),
        ("empty", {}, "{0} has no tokenizer that can be read ("),
        ("half", {"tokenizer.json": "{"}, "{0} has no tokenizer that can be read ("),
        ("other", {"tokenizer.json": "{}", "tokenizer_config.json": "[]"}, "{0} has no tokenizer that can be read ("),
    ],
)
def test_a_target_without_a_tokenizer_is_one_line(
    name: str, content: dict[str, str] | str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "response": "b"}')
    target = tmp_path / name
    if isinstance(content, str):
        target.write_text(content)
    elif content is not None:
        target.mkdir()
        for file, text in content.items():
            (target / file).write_text(text)
    words = ["data", "prepare", str(tmp_path / "rows.jsonl"), "--target", str(target), "--out", str(tmp_path / "out")]
    assert headstart.main(words) == 2
    said = capsys.readouterr().err
    assert message.format(target) in said and said.count("error: ") == 1
