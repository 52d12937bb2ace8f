"""Answers written anew: by the local engine and by a server, whatever the order, however often it is stopped."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from data.completer import Completion
from data.local import LocalAnswerer
from data.prepare import prepare
from data.regenerate import CONVERSATIONS, FAILURES, JOURNAL, RegenerateReport, regenerate
from data.server import ServerAnswerer
from tests.data import toys
from tests.data.chat_server import Reply, said, serving
from tests.data.toys import chat, write_jsonl

SETTINGS = {"model": "toy", "temperature": 0.0}


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@dataclass
class Shouting:
    """An engine that answers a question in capitals; ``asked`` holds every prompt."""

    tokenizer: Any
    asked: list[str] = field(default_factory=list)

    def complete(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> list[Completion]:
        made = []
        for ids in prompts:
            text = self.tokenizer.decode(ids)
            self.asked.append(text)
            answer = text.removesuffix("[E][A]").rpartition("[U]")[2].upper()
            made.append(Completion(self.tokenizer(answer).input_ids[:max_new_tokens], len(answer) <= max_new_tokens))
        return made


def local(folder: Path, rows: list[Any], **options: Any) -> tuple[Shouting, RegenerateReport, list[dict[str, Any]]]:
    tokenizer = toys.tokenizer()
    engine = Shouting(tokenizer)
    answerer = LocalAnswerer(engine, tokenizer, 6, chunk=2)
    report = regenerate([write_jsonl(folder / "rows", rows)], answerer, folder / "out", SETTINGS, **options)
    return engine, report, rows_of(folder / "out" / CONVERSATIONS)


ROWS: list[Any] = [
    {"id": "two", "messages": [{"role": "system", "content": "s"}, *chat("hi", "x", "ho", "y")]},
    {"id": "cut", "messages": chat("a", "x", "long question", "y", "z", "z")},
    {"id": "bare", "messages": chat("only")},
]


def test_the_local_engine_rewrites_every_turn(tmp_path: Path) -> None:
    engine, report, rows = local(tmp_path, ROWS)
    made = {row["id"]: [message["content"] for message in row["messages"]] for row in rows}
    assert made == {
        "bare": ["only", "ONLY"],
        "cut": ["a", "A", "long question", "LONG Q"],
        "two": ["s", "hi", "HI", "ho", "HO"],
    }
    marks = {row["id"]: (row["finished"], row["status"], row["left_out"], row["answer_tokens"]) for row in rows}
    assert marks == {"bare": (True, "whole", 0, 4), "cut": (False, "cut", 1, 7), "two": (True, "whole", 0, 4)}
    assert (report.rows, report.whole, report.cut, report.failed, report.answer_tokens) == (3, 2, 1, 0, 15)
    assert "[S]s[E][U]hi[E][A]HI[E][U]ho[E][A]" in engine.asked  # the second question stands behind the new answer
    assert len(engine.asked) == 5


def test_order_does_not_matter(tmp_path: Path) -> None:
    files = []
    for name, rows in (("there", ROWS), ("back", ROWS[::-1])):
        (tmp_path / name).mkdir()
        local(tmp_path / name, rows)
        files.append((tmp_path / name / "out" / CONVERSATIONS).read_bytes())
    assert files[0] == files[1]


def test_rows_that_cannot_be_asked_are_refused_by_number(tmp_path: Path) -> None:
    call = {"role": "assistant", "tool_calls": [{"name": "f"}]}
    rows = [{"text": "t"}, {"messages": [*chat("q"), call]}, {"messages": []}, ROWS[2], ROWS[2]]
    _, report, made = local(tmp_path, rows)
    assert report.dropped == {"no question": 1, "has tools": 1, "no turns": 1}
    assert [line.partition(":")[2][:1] for line in report.refused] == ["1", "2", "3"]
    assert (report.duplicates, len(made)) == (1, 1)
    assert not report.clean
    assert re.search(r"^refused +3$", report.table(), re.M)


def test_nothing_answered_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no conversation was answered.*no turns: 1.*rows:1"):
        regenerate(
            [write_jsonl(tmp_path / "rows", [{"messages": []}])],
            LocalAnswerer(Shouting(toys.tokenizer()), toys.tokenizer(), 5),
            tmp_path / "out",
            SETTINGS,
        )


def question(body: dict[str, Any]) -> str:
    return str(body["messages"][-1]["content"])


def serve_rows(count: int) -> list[dict[str, Any]]:
    return [{"messages": chat(f"q{i}", "old")} for i in range(1, count + 1)]


def by_server(url: str, source: Path, out: Path, **options: Any) -> RegenerateReport:
    retry = options.pop("retry_failed", False)
    stop = options.pop("progress", lambda *_: None)
    server = ServerAnswerer(url, "toy", 20, pause=lambda seconds: None, **options)
    return regenerate([source], server, out, SETTINGS, retry_failed=retry, progress=stop)


def test_failed_and_cut_rows_and_a_run_that_is_stopped(tmp_path: Path) -> None:
    """The second row fails, the third is cut, the run ends behind it: nothing is asked twice, nothing is half."""

    def reply(body: dict[str, Any]) -> Reply:
        if question(body) == "q2":
            return 400, {"error": {"message": "too long for me"}}
        return said(question(body).upper(), "length" if question(body) == "q3" else "stop")

    def stop(stage: str, done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    rows, out = serve_rows(6), tmp_path / "out"
    with serving(reply) as server:
        with pytest.raises(KeyboardInterrupt):
            by_server(server.url, write_jsonl(tmp_path / "rows", rows), out, concurrency=1, progress=stop)
        noted = len(rows_of(out / JOURNAL))
        assert noted == 3
        with (out / JOURNAL).open("a") as file:  # as a killed process leaves it
            file.write('{"id": "x", "mess')
        before = {question(body) for body in server.asked[:3]}
        del server.asked[:]
        by_server(server.url, write_jsonl(tmp_path / "rows", rows[::-1]), out)
        assert {question(body) for body in server.asked} == {f"q{i}" for i in range(1, 7)} - before
        assert len(server.asked) == 3
        del server.asked[:]
        report = by_server(server.url, write_jsonl(tmp_path / "rows", rows[2:] + rows[:2]), out)
        assert server.asked == []
    assert (report.rows, report.whole, report.cut, report.failed, report.lost, report.there) == (6, 4, 1, 1, 1, 6)
    made = rows_of(out / CONVERSATIONS)
    assert len({row["key"] for row in made}) == len(made) == 5
    assert all(row["messages"][-1]["role"] == "assistant" for row in made)
    assert [row["messages"][1]["content"] for row in made if not row["finished"]] == ["Q3"]
    (failed,) = rows_of(out / FAILURES)
    assert (failed["status"], failed["messages"]) == ("failed", [])
    assert failed["error"] == "the server answers 400: too long for me"
    kept = prepare([out / CONVERSATIONS], toys.tokenizer(), tmp_path / "prepared")
    assert (kept.kept, kept.unfinished) == ({"train": 5}, 1)


def test_failed_rows_are_asked_again_when_told_to(tmp_path: Path) -> None:
    broken = True

    def reply(body: dict[str, Any]) -> Reply:
        if broken and question(body) == "second":
            return said(None, "content_filter")
        return said(question(body).upper())

    rows, out = [{"id": 1, "messages": chat("first", "x", "second", "y")}], tmp_path / "out"
    source = write_jsonl(tmp_path / "rows", rows)
    with serving(reply) as server:
        report = by_server(server.url, source, out)
        (row,) = rows_of(out / CONVERSATIONS)
        assert [message["content"] for message in row["messages"]] == ["first", "FIRST"]
        assert (row["status"], row["left_out"], report.failed, report.lost) == ("failed", 1, 1, 0)
        broken = False
        assert by_server(server.url, source, out).failed == 1
        report = by_server(server.url, source, out, retry_failed=True)
    assert (report.whole, report.failed) == (1, 0)
    (row,) = rows_of(out / CONVERSATIONS)
    assert [message["content"] for message in row["messages"]] == ["first", "FIRST", "second", "SECOND"]


def test_folders_of_others_and_other_settings_are_left_alone(tmp_path: Path) -> None:
    local(tmp_path, ROWS)
    answerer = LocalAnswerer(Shouting(toys.tokenizer()), toys.tokenizer(), 6)
    with pytest.raises(ValueError, match=r"other settings \(model='toy'\)"):
        regenerate([tmp_path / "rows"], answerer, tmp_path / "out", {**SETTINGS, "model": "other"})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not made by regeneration"):
        regenerate([tmp_path / "rows"], answerer, tmp_path / "mine", SETTINGS)
