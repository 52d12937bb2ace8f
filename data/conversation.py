"""Any row people have → one conversation, or a refusal that names what was wrong with it.

Shapes of rows are one table, :data:`SHAPES`. A row never loses a turn silently: what cannot be read is refused, and
the one thing that is taken away (an assistant's turn before anybody asked) is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from data.messages import from_json, read_tools, read_turn, text_of
from data.roles import ROLES
from data.turns import Conversation, Refusal, Turn

Row = Mapping[str, Any]
Roles = Mapping[str, str]
SYSTEM_KEYS = ("system", "system_prompt")


def mend(value: Any) -> Any:
    """``value`` with U+FFFD for halves of surrogate pairs, which no tokenizer takes; the same object if it has none."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return value
    if isinstance(value, list):
        items = [mend(item) for item in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    if isinstance(value, Mapping):
        pairs = [(mend(key), mend(item)) for key, item in value.items()]
        same = all(new is key and item is value[key] for (new, item), key in zip(pairs, value, strict=True))
        return value if same else dict(pairs)
    return value


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and (value.get("role") is not None or value.get("from") is not None)


def _messages(key: str) -> Callable[[Row, Roles], list[Turn]]:
    def read(row: Row, roles: Roles) -> list[Turn]:
        messages = row[key]
        if isinstance(messages, str) and messages.lstrip().startswith("["):  # as tables without lists keep them
            messages = from_json(messages, "messages are no list", f"`{key}`")
        if not isinstance(messages, list):
            raise Refusal("messages are no list", f"`{key}` is {type(messages).__name__}, expected a list")
        return [read_turn(message, roles) for message in messages]

    return read


def _side(value: Any, role: str, roles: Roles) -> list[Turn]:
    """One side of a pair: text, or a list of messages."""
    if isinstance(value, list) and value and all(map(_is_message, value)):
        return [read_turn(message, roles) for message in value]
    return [Turn(role, text_of(value))]


def _pair(asked: str, answered: str, context: str | None = None) -> Callable[[Row, Roles], list[Turn]]:
    """Question and answer; ``context`` stands under the question, pairs of a ``history`` before it."""

    def read(row: Row, roles: Roles) -> list[Turn]:
        before = row.get("history") or []
        if not isinstance(before, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in before):
            raise Refusal("history is no list of pairs", "`history` is expected to hold pairs of question and answer")
        turns = [turn for q, a in before for turn in (Turn("user", text_of(q)), Turn("assistant", text_of(a)))]
        question = _side(row[asked], "user", roles)
        under = text_of(row[context]) if context and row.get(context) is not None else ""
        if under.strip():
            last = question[-1]
            question[-1] = Turn(last.role, f"{last.content}\n\n{under}")
        return turns + question + _side(row[answered], "assistant", roles)

    return read


SHAPES: tuple[tuple[tuple[str, ...], Callable[[Row, Roles], list[Turn]]], ...] = (
    (("messages",), _messages("messages")),
    (("conversations",), _messages("conversations")),
    (("conversation",), _messages("conversation")),
    (("instruction", "output"), _pair("instruction", "output", "input")),
    (("instruction", "response"), _pair("instruction", "response", "context")),
    (("prompt", "response"), _pair("prompt", "response")),
    (("prompt", "completion"), _pair("prompt", "completion")),
    (("question", "answer"), _pair("question", "answer")),
)
"""Shapes in order of trial: the keys that must be there (null counts as absent), and how the turns are read."""
TEXT = "text"
"""The key of a row that is plain text; tried last."""


def read_conversation(row: Any, name: str, roles: Roles = ROLES, *, answered: bool = True) -> Conversation:
    """Read one row.

    Args:
        row: a decoded JSON row: an object in one of :data:`SHAPES`, with an optional top-level ``system`` or
            ``system_prompt``, ``tools``, ``id`` and ``finished``; an object with plain ``text``; a bare list of
            messages; or the refusal that reading its file ended in.
        name: the conversation's id when the row has none.
        roles: names of roles → the four of :data:`data.roles.ROLES`.
        answered: refuse a row without an answer; else a question alone is a conversation.

    Raises:
        Refusal: no known shape, an unknown role, content that is not text, or nothing to learn from.
    """
    if isinstance(row, Refusal):
        raise row
    try:
        whole = mend(row)
        return _read(whole, name, roles, answered, mended=whole is not row)
    except RecursionError as error:
        raise Refusal("nested too deeply", "the row's lists and objects are nested too deeply") from error


def _read(row: Any, name: str, roles: Roles, answered: bool, mended: bool) -> Conversation:
    if isinstance(row, list):
        row = {"messages": row}
    if not isinstance(row, Mapping):
        raise Refusal("row is no object", f"the row is {type(row).__name__}, expected an object or a list of messages")
    present = {key for key, value in row.items() if value is not None}
    id = str(row["id"]) if "id" in present and row["id"] != "" else name
    fitting = [(keys, read) for keys, read in SHAPES if present.issuperset(keys)]
    shape = next((read for keys, read in fitting if row[keys[0]] != []), fitting[0][1] if fitting else None)
    if shape is None:
        return _document(row, id, present, mended)
    turns = shape(row, roles)
    system = _system(row)
    if system is not None and system not in (turn.content for turn in turns if turn.role == "system"):
        if any(turn.role == "system" for turn in turns):
            raise Refusal(
                "two system prompts", "the row has a system prompt at the top and another as a turn: keep one"
            )
        turns.insert(0, Turn("system", system))
    finished = row["finished"] if "finished" in present else True
    if not isinstance(finished, bool):
        raise Refusal("finished is no boolean", f"`finished` is {finished!r}, expected true or false")
    kept, orphans = _asked(turns, answered)
    if not finished and kept[-1].role != "assistant":
        raise Refusal("cut turn is not last", "`finished` is false, but the last turn is not the assistant's")
    tools = read_tools(row.get("tools") if row.get("tools") is not None else row.get("functions"))
    return Conversation(id, tuple(kept), finished, orphans, tools, mended=mended)


def _document(row: Row, id: str, present: set[str], mended: bool) -> Conversation:
    if TEXT not in present:
        known = "; ".join([*(" and ".join(keys) for keys, _ in SHAPES), TEXT])
        raise Refusal("unknown shape", f"the row has keys {sorted(map(str, present))}; expected one of: {known}")
    if not isinstance(row[TEXT], str):
        raise Refusal("content is not text", f"`text` is {type(row[TEXT]).__name__}, expected text")
    if not row[TEXT].strip():
        raise Refusal("empty text", "`text` is empty")
    return Conversation(id, (), text=row[TEXT], mended=mended)


def _system(row: Row) -> str | None:
    """The system prompt at the top of the row, if it says anything."""
    found = [text_of(row[key]) for key in SYSTEM_KEYS if row.get(key) is not None]
    said = list(dict.fromkeys(text for text in found if text.strip()))
    if len(said) > 1:
        raise Refusal("two system prompts", "the row has two different system prompts at the top: keep one")
    return said[0] if said else None


def _asked(turns: list[Turn], answered: bool) -> tuple[list[Turn], int]:
    """The turns without orphaned first answers, and how many those were, if there is anything to learn from them."""
    if not turns:
        raise Refusal("no turns", "the conversation is empty")
    start = 1 if turns[0].role == "system" else 0
    asked = next((i for i in range(start, len(turns)) if turns[i].role != "assistant"), len(turns))
    kept = turns[:start] + turns[asked:]
    if answered and not any(turn.role == "assistant" for turn in kept):
        raise Refusal("no answer", "the conversation has no assistant's turn that follows a user's")
    if not any(turn.role == "user" for turn in kept):
        raise Refusal("no question", "the conversation has no user's turn")
    return kept, asked - start
