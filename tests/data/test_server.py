"""Answers from a server: many requests at once, again when it is busy, an end when it is no use."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from data.regenerate import CONVERSATIONS, FAILURES, JOURNAL, regenerate
from data.server import FAILURES_IN_A_ROW, ServerAnswerer, read_answer
from tests.data.chat_server import Reply, said, serving
from tests.data.test_regenerate import SETTINGS, by_server, question, rows_of, serve_rows
from tests.data.toys import write_jsonl


def test_many_at_once_and_never_more(tmp_path: Path) -> None:
    together = threading.Barrier(3, timeout=20)

    def reply(body: dict[str, Any]) -> Reply:
        together.wait()
        return said("a")

    with serving(reply) as server:
        report = by_server(server.url, write_jsonl(tmp_path / "rows", serve_rows(9)), tmp_path / "out", concurrency=3)
    assert (report.whole, server.most) == (9, 3)


def test_a_busy_server_is_asked_again(tmp_path: Path) -> None:
    times: dict[str, int] = {}
    paused: list[float] = []

    def reply(body: dict[str, Any]) -> Reply:
        times[question(body)] = times.get(question(body), 0) + 1
        first = {"q1": (503, {}), "q2": (429, {"error": "slow down"}), "q3": (200, b"{half"), "q4": (500, b"")}
        return first[question(body)] if times[question(body)] < 3 else said("a")

    rows = write_jsonl(tmp_path / "rows", serve_rows(4))
    with serving(reply) as server:
        answerer = ServerAnswerer(server.url, "toy", 20, pause=paused.append, retries=2)
        report = regenerate([rows], answerer, tmp_path / "out", SETTINGS)
        assert (report.whole, set(times.values()), answerer.requests) == (4, {3}, 12)
        assert len(paused) == 8
        assert 0.75 <= min(paused) <= max(paused) <= 2.5
        times.clear()
        with pytest.raises(ValueError, match="4 failed"):
            by_server(server.url, rows, tmp_path / "other", retries=1)
    assert {row["error"] for row in rows_of(tmp_path / "other" / FAILURES)} == {
        "the server answers 503: Service Unavailable",
        "the server answers 429: slow down",
        "the server's answer is not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))",
        "the server answers 500: Internal Server Error",
    }


@pytest.mark.parametrize("status", [401, 404])
def test_a_wrong_key_or_model_stops_the_run(tmp_path: Path, status: int) -> None:
    with (
        serving(lambda body: (status, {"error": {"message": "not you"}})) as server,
        pytest.raises(OSError, match=f"answers {status}: not you"),
    ):
        by_server(server.url, write_jsonl(tmp_path / "rows", serve_rows(50)), tmp_path / "out")
    assert not (tmp_path / "out" / JOURNAL).exists()


def test_a_server_that_is_gone_stops_the_run_and_loses_nothing(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows", serve_rows(50))
    with serving(lambda body: said("a")) as server:
        url = server.url
    with pytest.raises(OSError, match="cannot be reached"):
        by_server(url, source, tmp_path / "out", retries=1)
    assert not (tmp_path / "out" / JOURNAL).exists()
    with serving(lambda body: (400, {})) as server, pytest.raises(OSError, match=f"{FAILURES_IN_A_ROW} conversations"):
        by_server(server.url, source, tmp_path / "out")


def test_what_is_sent(tmp_path: Path) -> None:
    """The key in its header and nowhere else; a seed of each row's own when sampling; the same whatever the order."""
    seeds = []
    for name, rows in (("there", serve_rows(3)), ("back", serve_rows(3)[::-1])):
        with serving(lambda body: said("a")) as server:
            by_server(
                server.url,
                write_jsonl(tmp_path / name, rows),
                tmp_path / f"out-{name}",
                temperature=0.7,
                key="secret-key",
            )
        seeds.append({question(body): body["seed"] for body in server.asked})
        assert set(server.keys) == {"Bearer secret-key"}
        assert all("secret-key" not in path.read_text() for path in (tmp_path / f"out-{name}").iterdir())
        assert server.asked[0] | {"seed": 0, "messages": []} == {
            "model": "toy",
            "messages": [],
            "max_tokens": 20,
            "temperature": 0.7,
            "seed": 0,
        }
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0].values())) == 3
    assert "secret-key" not in repr(ServerAnswerer("u", "m", 1, key="secret-key"))


@pytest.mark.parametrize("url", ["localhost:8000/v1", "not a url", "file:///etc/passwd", "http://", ""])
def test_what_is_no_address_is_told_at_once(tmp_path: Path, url: str) -> None:
    source = write_jsonl(tmp_path / "rows", serve_rows(2))
    with pytest.raises(OSError, match=r"is no address of a server: write it as http://HOST:PORT/v1"):
        by_server(url, source, tmp_path / "out")
    with pytest.raises(OSError, match=r"is no address of a server"):
        ServerAnswerer(url, "", 1).only_model()


def test_the_one_model_of_a_server() -> None:
    with serving(lambda body: said("a")) as server:
        assert ServerAnswerer(server.url, "", 1).only_model() == "toy"
        server.models = ["a", "b"]
        with pytest.raises(OSError, match=r"2 models \(a, b\): name one with --model"):
            ServerAnswerer(server.url, "", 1).only_model()


@pytest.mark.parametrize(
    ("told", "error"),
    [
        ({}, "lacks 'choices'"),
        ({"choices": []}, "lacks"),
        ({"choices": [{"message": {"content": "x"}, "finish_reason": "tool_calls"}]}, "'tool_calls'"),
        ({"choices": [{"message": {"content": 3}, "finish_reason": "stop"}]}, "no text"),
        ("x", "lacks"),
    ],
)
def test_answers_that_are_none(told: Any, error: str) -> None:
    assert error in str(read_answer(told).error)


def test_an_empty_answer_is_a_failed_one(tmp_path: Path) -> None:
    with serving(lambda body: said(" ")) as server, pytest.raises(ValueError, match="1 failed"):
        by_server(server.url, write_jsonl(tmp_path / "rows", serve_rows(1)), tmp_path / "out")
    assert rows_of(tmp_path / "out" / FAILURES)[0]["error"] == "the answer is empty"


def test_reasoning_is_kept_beside_the_answer(tmp_path: Path) -> None:
    with serving(lambda body: said("a", reasoning_content=" why ")) as server:
        by_server(server.url, write_jsonl(tmp_path / "rows", serve_rows(1)), tmp_path / "out")
    assert rows_of(tmp_path / "out" / CONVERSATIONS)[0]["messages"][1] == {
        "role": "assistant",
        "content": "a",
        "reasoning_content": " why ",
    }
