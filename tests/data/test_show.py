"""``data inspect``: what is learned stands between marks, of sources and of prepared folders alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.prepare import prepare
from data.show import COLOURED, MARKED, show
from tests.data import toys
from tests.data.toys import chat, write_jsonl

ROWS = [{"id": "x", "messages": chat("hi", "ok", "a", "b")}, {"conversations": []}, {"text": "t\x1b[31mred"}]


def test_marks_and_colours(tmp_path: Path) -> None:
    first, second, third = show([write_jsonl(tmp_path / "rows", ROWS)], toys.tokenizer())
    assert first.text(MARKED) == "x: 14 tokens, 5 learned\n[U]hi[E][A]⟦ok[E]⟧[U]a[E][A]⟦b[E]⟧"
    assert "[A]\x1b[1;32mok[E]\x1b[0m[U]" in first.text(COLOURED)
    assert second.text(MARKED) == "rows:2: refused, the conversation is empty"
    assert third.text(MARKED) == "rows:3: 9 tokens, 9 learned\n⟦t␛[31mred⟧"  # nothing in a row steers the terminal


@pytest.mark.parametrize("limit", [None, 8])
def test_a_prepared_folder_is_shown_as_it_is(tmp_path: Path, limit: int | None) -> None:
    source = write_jsonl(tmp_path / "rows", ROWS[:1])
    prepare([source], toys.tokenizer(), tmp_path / "out", max_length=limit or 1024)
    of_folder = list(show([tmp_path / "out"], toys.tokenizer()))
    assert of_folder == list(show([source], toys.tokenizer(), max_length=limit))
    assert of_folder[0].tokens == (limit or 14)


def test_several_sequences_of_one_conversation(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows", [{"messages": chat("q", "<think>t</think>a", "r", "b")}])
    shown = [one.text(MARKED) for one in show([source], toys.tokenizer(toys.THINKING))]
    assert shown == [
        "rows:1#1: 22 tokens, 18 learned\n[U]q[E][A]⟦<think>t</think>a[E]⟧",
        "rows:1: 27 tokens, 2 learned\n[U]q[E][A]a[E][U]r[E][A]<think></think>⟦b[E]⟧",
    ]
