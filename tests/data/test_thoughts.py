"""Thoughts and tools: what templates take away, insert, or have no place for, and what is learned of it."""

from __future__ import annotations

import pytest

from data.render import Renderer
from data.turns import Refusal, ToolCall, Turn
from tests.data import toys
from tests.data.test_render import FOUR, turns, views
from tests.data.toys import chat

THOUGHT = chat("q", "<think>first</think>a", "r", "<think>second</think>b")


@pytest.mark.parametrize(
    "said",
    [
        turns(THOUGHT),
        [
            Turn("user", "q"),
            Turn("assistant", "a", reasoning="first"),
            Turn("user", "r"),
            Turn("assistant", "b", reasoning="second"),
        ],
    ],
)
def test_thoughts_that_are_taken_from_earlier_turns(said: list[Turn]) -> None:
    """Each answer is learned where it was said, its thoughts with it; later sequences hold none of the earlier."""
    assert views(toys.THINKING, said) == [
        "[U]q[E][A]{<think>first</think>a[E]}",
        "[U]q[E][A]a[E][U]r[E][A]{<think>second</think>b[E]}",
    ]


def test_each_sequence_is_the_rendering_up_to_its_answer() -> None:
    tokenizer = toys.tokenizer(toys.THINKING)
    rendered = Renderer(tokenizer).render(turns(THOUGHT))
    for one, through in zip(rendered, (2, 4), strict=True):
        wanted = tokenizer.apply_chat_template(THOUGHT[:through], tokenize=True, return_dict=False)
        assert one.ids == wanted
    assert [one.last for one in rendered] == [1, 3]


def test_an_inserted_empty_block_of_thoughts_is_given_and_not_said() -> None:
    assert views(toys.THINKING, turns(FOUR)) == [
        "[U]hi[E][A]<think></think>{ok[E]}",
        "[U]hi[E][A]ok[E][U]a[E][A]<think></think>{b[E]}",
    ]


def test_thoughts_that_are_always_taken_away_are_put_back_where_they_were_said() -> None:
    """The generation prompt begins them, so the answer goes on from there; plain answers have no such beginning."""
    assert views(toys.OPENED, turns(THOUGHT)) == [
        "[U]q[E][A]<think>{first</think>a[E]}",
        "[U]q[E][A]a[E][U]r[E][A]<think>{second</think>b[E]}",
    ]
    assert views(toys.OPENED, turns(FOUR)) == ["[U]hi[E][A]{ok[E]}[U]a[E][A]{b[E]}"]


def test_reasoning_apart_goes_where_a_template_knows_thoughts() -> None:
    said = [Turn("user", "q"), Turn("assistant", "a", reasoning="why")]
    assert views(toys.OPENED, said) == ["[U]q[E][A]<think>{why\n</think>\n\na[E]}"]


def test_limits_hold_for_each_sequence() -> None:
    assert views(toys.THINKING, turns(THOUGHT), max_length=12) == [
        "[U]q[E][A]{<think>f}",
        "[U]q[E][A]a[E][U]r[E][A]{<t}",
    ]


def test_reasoning_without_a_place_is_refused() -> None:
    with pytest.raises(Refusal, match="no place for an answer's reasoning"):
        views(toys.NOGEN, [Turn("user", "q"), Turn("assistant", "a", reasoning="first")])


def test_questions_that_would_change_the_last_answer_are_left_out_and_counted() -> None:
    tokenizer = toys.tokenizer(toys.THINKING)
    (rendered,) = Renderer(tokenizer).render(turns(chat("q", "a", "r")))
    assert toys.learned(tokenizer, rendered) == "[U]q[E][A]<think></think>{a[E]}"
    assert rendered.left_out == 1


LOOK_UP = ToolCall("look_up", {"key": "x"})


TOOL_TURNS = [Turn("user", "q"), Turn("assistant", "", (LOOK_UP,)), Turn("tool", "42"), Turn("assistant", "ok")]


@pytest.mark.parametrize("template", [toys.TOOLS, toys.TOOLS_JOINED, toys.TOOLS_PRINTED])
def test_calls_are_learned_and_what_tools_say_is_not(template: str) -> None:
    assert views(template, TOOL_TURNS) == ['[U]q[E][A]{look_up({"key": "x"})[E]}[U]tool:42[E][A]{ok[E]}']


def test_tools_are_shown_or_refused() -> None:
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    assert views(toys.TOOLS, TOOL_TURNS, tools=tools)[0].startswith('[S][{"type": "function", "function": {"name": "l')
    with pytest.raises(Refusal, match="no place for the row's tools"):
        views(toys.NOGEN, turns(FOUR), tools=tools)
    with pytest.raises(Refusal, match="does not show all of the assistant's turn 'look_up'"):
        views(toys.NOGEN, TOOL_TURNS[:2])
