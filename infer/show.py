"""Text on a terminal with the tokens that the draft got right marked.

A token is marked when the target accepted it from a draft; unmarked ones the target wrote itself. Where colour is
not wanted (no terminal, or ``NO_COLOR`` set, see no-color.org) brackets stand in for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any

from torch import Tensor

from heads.draft import Draft
from infer.metrics import Round, Stats
from infer.stream import TextPieces

COLOUR = ("\x1b[30;42m", "\x1b[0m")
BRACKETS = ("⟦", "⟧")


def wants_colour(file: IO[str]) -> bool:
    """Whether to colour what is written to ``file``."""
    return file.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def flags(log: Iterable[Round]) -> list[bool]:
    """For each new token whether it is an accepted draft token; the first is the prefill's and never is."""
    marks = [False]
    for entry in log:
        marks += [True] * entry.accepted + [False] * (entry.emitted - entry.accepted)
    return marks


class Marker:
    """Turns tokens, one by one, into marked text.

    A character split over two tokens is shown with the token that completes it.

    Args:
        tokenizer: decodes; special tokens are not shown.
        colour: a green ground, otherwise ``⟦brackets⟧``.
    """

    def __init__(self, tokenizer: Any, colour: bool) -> None:
        self.colour = colour
        self._pieces = TextPieces(tokenizer)
        self._inside = False

    def push(self, token: int, accepted: bool) -> str:
        """What to write for the next token."""
        return self._write(self._pieces.push([token]), accepted)

    def end(self) -> str:
        """What to write when no token follows."""
        return self._write(self._pieces.rest(), self._inside) + self._turn(False)

    def _write(self, text: str, accepted: bool) -> str:
        if not text:
            return ""
        turn = self._turn(accepted)
        if accepted and self.colour:  # no ground across line ends: many terminals fill the rest of the line with it
            text = text.replace("\n", f"{COLOUR[1]}\n{COLOUR[0]}")
        return turn + text

    def _turn(self, accepted: bool) -> str:
        if accepted == self._inside:
            return ""
        self._inside = accepted
        return (COLOUR if self.colour else BRACKETS)[0 if accepted else 1]


def render(ids: Sequence[int], log: Iterable[Round], tokenizer: Any, colour: bool) -> str:
    """The marked text of a finished generation.

    Args:
        ids: its new tokens.
        log: its rounds (``Generation.stats.log``).
        tokenizer: decodes.
        colour: see :class:`Marker`.

    Raises:
        ValueError: the log is of another generation.
    """
    marks = flags(log)
    if len(ids) != len(marks):
        raise ValueError(f"{len(ids)} tokens cannot be shown by a log of {len(marks)}: it is of another generation")
    marker = Marker(tokenizer, colour)
    return "".join(marker.push(token, mark) for token, mark in zip(ids, marks, strict=True)) + marker.end()


class MarkedStream:
    """A streamer that writes marked text while it is decoded.

    Args:
        latest: gives the draft being verified, None before the first.
        marker: marks.
        write: called with each piece.
    """

    def __init__(self, latest: Callable[[], Draft | None], marker: Marker, write: Callable[[str], Any]) -> None:
        self._latest, self._marker, self._write = latest, marker, write
        self._draft: Draft | None = None
        self._node: int | None = None  # where in the draft; None: past it, until the next one
        self._prompt = True

    def put(self, value: Tensor) -> None:
        """A token; the first call brings the prompt, which is not shown."""
        if self._prompt:
            self._prompt = False
            return
        for token in value.flatten().tolist():
            piece = self._marker.push(token, self._accepted(token))
            if piece:
                self._write(piece)

    def end(self) -> None:
        """Nothing follows."""
        self._write(self._marker.end())

    def _accepted(self, token: int) -> bool:
        """Follow the draft: a token that is not among the children here is the target's own, and ends it."""
        draft = self._latest()
        if draft is not self._draft:
            self._draft, self._node = draft, -1
        if draft is None or self._node is None:
            return False
        self._node = next((child for child in draft.children(self._node) if draft.tokens[child] == token), None)
        return self._node is not None


def caption(stats: Stats, colour: bool) -> str:
    """The line under a marked text: what the marks mean, and tokens per round."""
    on, off = COLOUR if colour else BRACKETS
    figure = f"{stats.tokens_per_round:.2f} tokens per round" if stats.rounds else "no round was needed"
    return (
        f"{on}accepted from the draft{off}: {stats.accepted} of {stats.tokens} tokens; {figure}, {stats.rounds} rounds"
    )
