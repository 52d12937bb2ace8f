"""Rows of every shape: turns in = turns out, or a named refusal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.conversation import read_conversation
from data.roles import ROLES
from data.turns import Refusal, Turn
from tests.data.toys import chat

PAIR = (Turn("user", "q"), Turn("assistant", "a"))


@pytest.mark.parametrize("spelling", ["gpt", "chatgpt", "bing", "bard", "assistant", "GPT"])
def test_known_names_of_the_assistant(spelling: str) -> None:
    row = {"conversations": [{"from": "human", "value": "q"}, {"from": spelling, "value": "a"}]}
    assert read_conversation(row, "f:1").turns == PAIR


@pytest.mark.parametrize(
    "row",
    [
        {"messages": chat("q", "a")},
        {"messages": [{"role": "user", "content": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversations": chat("q", "a"), "messages": None},
        {"prompt": "q", "response": "a"},
        {"prompt": "q", "messages": chat("q", "a")},
        chat("q", "a"),
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, {"role": "gpt", "content": ["a"]}]},
    ],
)
def test_shapes(row: Any) -> None:
    conversation = read_conversation(row, "f:1")
    assert conversation.turns == PAIR
    assert conversation.id == "f:1"
    assert conversation.finished


def test_system_prompt_at_the_top_and_as_a_turn() -> None:
    top = read_conversation({"system": "be kind", "conversations": chat("q", "a")}, "f:1")
    turn = read_conversation({"conversations": [{"from": "system", "value": "be kind"}, *chat("q", "a")]}, "f:1")
    assert top.turns == turn.turns == (Turn("system", "be kind"), *PAIR)
    with pytest.raises(Refusal, match="keep one"):
        read_conversation({"system": "x", "messages": [{"role": "system", "content": "y"}, *chat("q", "a")]}, "f:1")


def test_answers_before_any_question_are_taken_away_and_counted() -> None:
    row = {"conversations": [{"from": "gpt", "value": "orphan"}, *chat("q", "a")]}
    conversation = read_conversation(row, "f:1")
    assert (conversation.turns, conversation.orphans) == (PAIR, 1)


@pytest.mark.parametrize(
    ("row", "reason", "words"),
    [
        ({"messages": [{"role": "laguna_s", "content": "x"}]}, "unknown role", "'laguna_s'"),
        ({"conversations": []}, "no turns", "empty"),
        ({"messages": chat("q")}, "no answer", "no assistant's turn"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "no answer", "no assistant's turn"),
        ({"messages": [{"content": "a"}]}, "message without role", "neither"),
        ({"messages": "hi"}, "messages are no list", "str"),
        ({"messages": ["hi"]}, "message is no object", "str"),
        ({"messages": [{"role": "user"}]}, "content is not text", "NoneType"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content is not text", "'image'"),
        ({"text": "hi"}, "unknown shape", r"\['text'\]"),
        ("hi", "row is no object", "str"),
        ({"messages": chat("q", "a"), "finished": "no"}, "finished is no boolean", "'no'"),
        ({"messages": chat("q", "a", "q"), "finished": False}, "cut turn is not last", "last turn"),
    ],
)
def test_refusals(row: Any, reason: str, words: str) -> None:
    with pytest.raises(Refusal, match=words) as caught:
        read_conversation(row, "f:1")
    assert caught.value.reason == reason


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(ROLES)), st.text(), st.booleans()), max_size=8),
    st.text(),
    st.sampled_from(["messages", "conversations"]),
)
def test_turns_in_are_turns_out(middle: list[tuple[str, str, bool]], answer: str, key: str) -> None:
    said = [("user", "q", False), *middle, ("assistant", answer, False)]
    messages = [{"from": r, "value": t} if sharegpt else {"role": r, "content": t} for r, t, sharegpt in said]
    conversation = read_conversation({key: messages}, "f:1")
    assert conversation.turns == tuple(Turn(ROLES[role], text) for role, text, _ in said)
    assert conversation.orphans == 0
