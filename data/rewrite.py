"""One conversation while its answers are written anew: what is asked next, what was answered, what becomes of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from data.turns import Conversation, Refusal, Turn

WHOLE, CUT, FAILED = "whole", "cut", "failed"


@dataclass(frozen=True)
class Answer:
    """What the target said: its text, its tokens, and whether it ended the turn; or why it said nothing."""

    text: str = ""
    finished: bool = True
    tokens: int = 0
    reasoning: str = ""
    error: str | None = None


@dataclass
class Rewriting:
    """A conversation, and how far its answers have been written anew.

    Users' turns (with system turns before them) are asked in their order; each answer of the target stands in the
    place of the answers that were there, and the next question is asked behind it. An answer that was cut, or that
    failed, ends the conversation: a question behind it would not be what its user asked.
    """

    id: str
    key: str
    questions: list[list[Turn]]
    turns: list[Turn] = field(default_factory=list)
    answered: int = 0
    tokens: int = 0
    status: str = WHOLE
    error: str | None = None

    @classmethod
    def of(cls, conversation: Conversation) -> Rewriting:
        """Split into questions; without an ``id`` (empty), it gets one from what is asked, wherever its row stands.

        Raises:
            Refusal: plain text has no question, and what a tool said does not fit calls that are written anew.
        """
        if conversation.text is not None:
            raise Refusal("no question", "plain text has no question to answer")
        if conversation.tools or any(turn.role == "tool" or turn.calls for turn in conversation.turns):
            raise Refusal("has tools", "what tools said would not fit calls that are written anew")
        questions: list[list[Turn]] = [[]]
        for turn in conversation.turns:
            if turn.role != "assistant":
                questions[-1].append(turn)
            elif questions[-1]:
                questions.append([])
        asked = [question for question in questions if question]
        said = [[(turn.role, turn.content) for turn in question] for question in asked]
        key = hashlib.sha256(json.dumps([conversation.id, said]).encode()).hexdigest()[:24]
        return cls(conversation.id or key, key, asked)

    @property
    def pending(self) -> bool:
        """Whether there is something left to ask."""
        return self.status == WHOLE and self.answered < len(self.questions)

    def prompt(self) -> list[Turn]:
        """What has been said so far, and the next question."""
        return [*self.turns, *self.questions[self.answered]]

    def take(self, answer: Answer) -> None:
        """Note the answer to :meth:`prompt`."""
        error = answer.error or (None if answer.text.strip() or answer.reasoning else "the answer is empty")
        if error:
            self.status, self.error = FAILED, error
            return
        self.turns = [*self.prompt(), Turn("assistant", answer.text, reasoning=answer.reasoning)]
        self.answered += 1
        self.tokens += answer.tokens
        if not answer.finished:
            self.status = CUT

    def row(self) -> dict[str, Any]:
        """What is written: the turns up to the last answer, never a question alone, and what is wrong with it."""
        row: dict[str, Any] = {
            "id": self.id,
            "key": self.key,
            "messages": [_message(turn) for turn in self.turns],
            "finished": self.status != CUT,
            "status": self.status,
            "answer_tokens": self.tokens,
            "left_out": len(self.questions) - self.answered,
        }
        return row if self.error is None else row | {"error": self.error}


def _message(turn: Turn) -> dict[str, str]:
    message = {"role": turn.role, "content": turn.content}
    return message | {"reasoning_content": turn.reasoning} if turn.reasoning else message


class Answerer(Protocol):
    """Plays conversations to their end: the local engine (:mod:`data.local`) or a server (:mod:`data.server`)."""

    def play(self, rewritings: Iterable[Rewriting]) -> Iterator[Rewriting]:
        """Ask what is pending until nothing is; conversations come out as they end, in any order."""
        ...
