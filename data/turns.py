"""What a conversation is once it is read: turns, tool calls, and the refusal of a row that cannot be used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

THINK, END_THINK = "<think>", "</think>"


class Refusal(ValueError):
    """A row that cannot be used. ``reason`` is short and the same for all rows with the same fault (it is counted)."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason

    def __reduce__(self) -> tuple[type[Refusal], tuple[str, str]]:
        """Pickled with both of its words, for workers."""
        return type(self), (self.reason, str(self))


@dataclass(frozen=True)
class ToolCall:
    """A function that the assistant calls; ``arguments`` by name."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None


@dataclass(frozen=True)
class Turn:
    """One message.

    Attributes:
        role: system, user, assistant or tool.
        content: its text; empty for an assistant that only calls tools.
        calls: the tools that an assistant calls.
        reasoning: what an assistant thought, where a row keeps it apart from the content.
        name: of the tool that answers, in a tool's turn.
        call_id: of the call that a tool's turn answers.
    """

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    name: str | None = None
    call_id: str | None = None

    @property
    def words(self) -> list[str]:
        """What must be found in a rendering of this turn, whatever a template does to the spaces between."""
        tags = self.content.replace(THINK, END_THINK) if self.role == "assistant" else self.content
        said = tags.split(END_THINK) if self.role == "assistant" else [tags]
        return [word for word in (self.reasoning.strip(), *map(str.strip, said), *(c.name for c in self.calls)) if word]

    @property
    def lasting_words(self) -> list[str]:
        """Those of :attr:`words` that stay when a template takes the thoughts of earlier turns away."""
        content = self.content.rpartition(END_THINK)[2] if self.role == "assistant" else self.content
        return [word for word in (content.strip(), *(call.name for call in self.calls)) if word]


@dataclass(frozen=True)
class Conversation:
    """One row, read.

    Attributes:
        id: the row's own id, or its file's name and number.
        turns: at least one, never beginning (after a system turn) with the assistant; none for plain text.
        finished: False when the last answer was cut, so that no end of turn may be rendered behind it.
        orphans: assistant's turns taken from the front, as nobody had asked yet.
        tools: descriptions of the functions that the assistant could call, as chat templates take them.
        text: a document in place of turns.
        mended: halves of surrogate pairs stood in it, and are U+FFFD now.
    """

    id: str
    turns: tuple[Turn, ...]
    finished: bool = True
    orphans: int = 0
    tools: tuple[Mapping[str, Any], ...] = ()
    text: str | None = None
    mended: bool = False

    @property
    def prompt(self) -> str:
        """All that the user says, joined (or the document): what the held-out rule compares."""
        if self.text is not None:
            return self.text
        return "\n".join(turn.content for turn in self.turns if turn.role == "user")
