"""Any row people have → one conversation, or a refusal that names what was wrong with it.

Shapes of rows and names of roles are two tables, :data:`SHAPES` and :data:`ROLES`; nothing else in the package
knows them. A row never loses a turn silently: what cannot be read is refused, and the one thing that is taken
away (an assistant's turn before anybody asked) is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

ROLES: dict[str, str] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}
"""Every role's name in use → the three that chat templates know."""


class Refusal(ValueError):
    """A row that cannot be used. ``reason`` is short and the same for all rows with the same fault (it is counted)."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class Turn:
    """One message; ``role`` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class Conversation:
    """One row, read.

    Attributes:
        id: the row's own id, or its file's name and number.
        turns: at least one; never begins (after a system turn) with the assistant.
        finished: False when the last answer was cut, so that no end of turn may be rendered behind it.
        orphans: assistant's turns taken from the front, as nobody had asked yet.
    """

    id: str
    turns: tuple[Turn, ...]
    finished: bool = True
    orphans: int = 0

    @property
    def prompt(self) -> str:
        """All that the user says, joined: what the held-out rule compares."""
        return "\n".join(turn.content for turn in self.turns if turn.role == "user")


def _text(content: Any) -> str:
    """A message's text: a string, or a list of text parts joined."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part(part) for part in content)
    raise Refusal("content is not text", f"a message's content is {type(content).__name__}, expected text")


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise Refusal("content is not text", f"a message has a part of type {kind!r}; only text can be trained on")


def _turn(message: Any) -> Turn:
    """A message in either spelling of its keys: role and content, or from and value."""
    if not isinstance(message, Mapping):
        raise Refusal("message is no object", f"a message is {type(message).__name__}, expected an object")
    role = message.get("role") if message.get("role") is not None else message.get("from")
    content = message.get("content") if message.get("content") is not None else message.get("value")
    if not isinstance(role, str):
        raise Refusal("message without role", f"a message has neither `role` nor `from` (its keys: {sorted(message)})")
    if role.lower() not in ROLES:
        raise Refusal("unknown role", f"unknown role {role!r} (known: {', '.join(ROLES)})")
    return Turn(ROLES[role.lower()], _text(content))


def _messages(key: str) -> Callable[[Mapping[str, Any]], list[Turn]]:
    def read(row: Mapping[str, Any]) -> list[Turn]:
        if not isinstance(row[key], list):
            raise Refusal("messages are no list", f"`{key}` is {type(row[key]).__name__}, expected a list")
        return [_turn(message) for message in row[key]]

    return read


def _pair(asked: str, answered: str) -> Callable[[Mapping[str, Any]], list[Turn]]:
    def read(row: Mapping[str, Any]) -> list[Turn]:
        return [Turn("user", _text(row[asked])), Turn("assistant", _text(row[answered]))]

    return read


SHAPES: tuple[tuple[tuple[str, ...], Callable[[Mapping[str, Any]], list[Turn]]], ...] = (
    (("messages",), _messages("messages")),
    (("conversations",), _messages("conversations")),
    (("prompt", "response"), _pair("prompt", "response")),
)
"""Shapes in order of trial: the keys that must be there (null counts as absent), and how the turns are read."""


def read_conversation(row: Any, name: str) -> Conversation:
    """Read one row.

    Args:
        row: a decoded JSON row: an object in one of :data:`SHAPES`, with an optional top-level ``system`` text, ``id``
            and ``finished``; or a bare list of messages.
        name: the conversation's id when the row has none.

    Raises:
        Refusal: no known shape, an unknown role, content that is not text, or nothing to learn from.
    """
    if isinstance(row, list):
        row = {"messages": row}
    if not isinstance(row, Mapping):
        raise Refusal("row is no object", f"the row is {type(row).__name__}, expected an object or a list of messages")
    present = {key for key, value in row.items() if value is not None}
    shape = next((read for keys, read in SHAPES if present.issuperset(keys)), None)
    if shape is None:
        known = "; ".join(" and ".join(keys) for keys, _ in SHAPES)
        raise Refusal("unknown shape", f"the row has keys {sorted(present)}; expected one of: {known}")
    turns = shape(row)
    if "system" in present:
        if any(turn.role == "system" for turn in turns):
            raise Refusal("two system prompts", "the row has a top-level `system` and a system turn: keep one")
        turns.insert(0, Turn("system", _text(row["system"])))
    finished = row["finished"] if "finished" in present else True
    if not isinstance(finished, bool):
        raise Refusal("finished is no boolean", f"`finished` is {finished!r}, expected true or false")
    return _checked(str(row["id"]) if "id" in present else name, turns, finished)


def _checked(id: str, turns: list[Turn], finished: bool) -> Conversation:
    """The conversation without its orphaned first answers, if there is anything to learn from it."""
    if not turns:
        raise Refusal("no turns", "the conversation is empty")
    start = 1 if turns[0].role == "system" else 0
    asked = next((i for i in range(start, len(turns)) if turns[i].role != "assistant"), len(turns))
    kept = turns[:start] + turns[asked:]
    if not any(turn.role == "assistant" for turn in kept):
        raise Refusal("no answer", "the conversation has no assistant's turn that follows a user's")
    if not finished and kept[-1].role != "assistant":
        raise Refusal("cut turn is not last", "`finished` is false, but the last turn is not the assistant's")
    return Conversation(id, tuple(kept), finished, orphans=asked - start)
