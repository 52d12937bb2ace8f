"""Rows of every shape: turns in = turns out, or a named refusal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.conversation import mend, read_conversation
from data.roles import ROLES, checked_roles
from data.turns import Refusal, ToolCall, Turn
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
        {"messages": [], "conversation": chat("q", "a")},
        {"messages": '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]'},
        {"messages": [{"role": "user", "content": "q", "from": None}, {"role": "Assistant ", "text": "a"}]},
        {"instruction": "q", "input": "", "output": "a"},
        {"instruction": "q", "input": None, "output": "a", "history": []},
        {"instruction": "q", "context": None, "response": "a"},
        {"prompt": chat("q"), "completion": [{"role": "assistant", "content": "a"}]},
        {"question": "q", "answer": "a", "system": " "},
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


def test_system_prompt_beside_many_turns() -> None:
    """Six turns and a system prompt in: seven out, wherever the prompt stood."""
    six = chat("a", "b", "c", "d", "e", "f")
    for row in ({"system": "s", "messages": six}, {"system_prompt": "s", "conversations": six}):
        assert [turn.content for turn in read_conversation(row, "f:1").turns] == list("sabcdef")
    as_turn = {"conversations": [{"from": "system", "value": "s"}, *six], "system": "s"}
    assert [turn.role for turn in read_conversation(as_turn, "f:1").turns] == ["system", *["user", "assistant"] * 3]


def test_pairs_with_context_and_history() -> None:
    row = {"instruction": "sum", "input": "1 2", "output": "3", "history": [["hi", "ho"]], "system": "s"}
    assert [turn.content for turn in read_conversation(row, "f:1").turns] == ["s", "hi", "ho", "sum\n\n1 2", "3"]


def test_names_of_roles_can_be_given() -> None:
    row = {"messages": [{"role": "user", "content": "q"}, {"role": "Laguna_S", "content": "a"}]}
    assert read_conversation(row, "f:1", checked_roles({"laguna_s": "assistant"})).turns == PAIR
    with pytest.raises(ValueError, match="cannot be 'narrator'"):
        checked_roles({"laguna_s": "narrator"})


CALL = {"function": {"name": "f", "arguments": {"x": 1}}}


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ({"role": "assistant", "tool_calls": [CALL]}, ToolCall("f", {"x": 1})),
        ({"role": "assistant", "content": None, "tool_calls": [CALL | {"id": 7}]}, ToolCall("f", {"x": 1}, "7")),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"x": 1}'}]}, ToolCall("f", {"x": 1})),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": '"{\\"x\\": 1}"'}]}, ToolCall("f", {"x": 1})),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "null"}]}, ToolCall("f")),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": None}]}, ToolCall("f")),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": ""}]}, ToolCall("f")),
        ({"role": "assistant", "tool_calls": '[{"name": "f"}]'}, ToolCall("f")),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": 1, "other": None}}]},
            ToolCall("f", {"x": 1}),
        ),
        ({"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}, ToolCall("f")),
        ({"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'}, ToolCall("f", {"x": 1})),
    ],
)
def test_calls_in_every_spelling(message: dict[str, Any], call: ToolCall) -> None:
    row = {
        "messages": [*chat("q"), message, {"role": "tool", "name": "f", "content": {"y": None}}, *chat("", "ok")[1:]]
    }
    conversation = read_conversation(row, "f:1")
    assert conversation.turns[1:] == (
        Turn("assistant", "", (call,)),
        Turn("tool", "{}", name="f"),
        Turn("assistant", "ok"),
    )


@pytest.mark.parametrize("calls", [["x"], [{"arguments": {}}], "x", [{"name": "f", "arguments": "[1]"}]])
def test_broken_calls_are_refused(calls: Any) -> None:
    with pytest.raises(Refusal) as caught:
        read_conversation({"messages": [*chat("q"), {"role": "assistant", "tool_calls": calls}]}, "f:1")
    assert caught.value.reason == "tool call is broken"


def test_tools_in_every_spelling() -> None:
    tool = {"name": "f", "parameters": {"type": "object", "x": None}}
    wanted = ({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},)
    for tools in ([tool], tool, [wanted[0]], '[{"name": "f", "parameters": {"type": "object"}}]', list(map(str, []))):
        conversation = read_conversation({"tools": tools, "messages": chat("q", "a")}, "f:1")
        assert conversation.tools == (wanted if tools else ())


def test_reasoning_beside_the_content() -> None:
    for key in ("reasoning_content", "reasoning", "thinking"):
        row = {"messages": [*chat("q"), {"role": "assistant", "content": "a", key: " why\n"}]}
        assert read_conversation(row, "f:1").turns[1] == Turn("assistant", "a", reasoning="why")


def test_halves_of_surrogate_pairs_are_mended() -> None:
    conversation = read_conversation({"messages": chat("hi\ud83d", "\ud83d\ude00")}, "f:1")
    assert conversation.turns == (Turn("user", "hi\ufffd"), Turn("assistant", "\U0001f600"))
    assert conversation.mended
    assert not read_conversation({"messages": chat("hi", "\U0001f600")}, "f:1").mended
    row = {"a": ["x", {"b": 1}]}
    assert mend(row) is row
    assert mend({"a\udc00": 1}) == {"a\ufffd": 1}


def test_rows_nested_without_end_are_refused() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(Refusal, match="nested too deeply"):
        read_conversation({"messages": chat("q", "a"), "extra": deep}, "f:1")


def test_a_question_alone_when_answers_are_not_needed() -> None:
    assert read_conversation({"messages": chat("q")}, "f:1", answered=False).turns == PAIR[:1]


def test_plain_text() -> None:
    conversation = read_conversation({"text": "once", "id": "t"}, "f:1")
    assert (conversation.text, conversation.turns, conversation.id, conversation.prompt) == ("once", (), "t", "once")


def test_answers_before_any_question_are_taken_away_and_counted() -> None:
    row = {"conversations": [{"from": "gpt", "value": "orphan"}, *chat("q", "a")]}
    conversation = read_conversation(row, "f:1")
    assert (conversation.turns, conversation.orphans) == (PAIR, 1)


@pytest.mark.parametrize(
    ("row", "reason", "words"),
    [
        ({"messages": [{"role": "laguna_s", "content": "x"}]}, "unknown role", "'laguna_s'.*--role laguna_s=ROLE"),
        ({"messages": [{"role": "user", "from": "gpt", "content": "x"}]}, "two roles", "keep one"),
        ({"messages": [{"role": "user", "content": "x", "value": "y"}]}, "two contents", "keep one"),
        ({"messages": [{"role": "assistant", "content": None}]}, "content is missing", "neither content nor tool"),
        ({"messages": [{"role": "tool", "content": "a"}, *chat("q", "a")][:1]}, "no answer", "no assistant's turn"),
        ({"messages": [{"role": "tool", "content": "x"}, chat("q", "a")[1]]}, "no question", "no user's turn"),
        ({"messages": "[{"}, "messages are no list", "not JSON"),
        ({"instruction": "q", "output": "a", "history": ["x"]}, "history is no list of pairs", "pairs"),
        ({"system": "x", "system_prompt": "y", "messages": chat("q", "a")}, "two system prompts", "different"),
        ({"text": ""}, "empty text", "empty"),
        ({"text": 3}, "content is not text", "int"),
        ({"tools": "x", "messages": chat("q", "a")}, "tools are no list", "not JSON"),
        ({"tools": [3], "messages": chat("q", "a")}, "tools are no list", "int"),
        (Refusal("not JSON", "not JSON (cut)"), "not JSON", "cut"),
        ({"conversations": []}, "no turns", "empty"),
        ({"messages": chat("q")}, "no answer", "no assistant's turn"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "no answer", "no assistant's turn"),
        ({"messages": [{"content": "a"}]}, "message without role", "neither"),
        ({"messages": "hi"}, "messages are no list", "str"),
        ({"messages": ["hi"]}, "message is no object", "str"),
        ({"messages": [{"role": "user"}]}, "content is missing", "no content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content is not text", "'image'"),
        ({"texts": "hi"}, "unknown shape", r"\['texts'\]"),
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
