"""JSON that need not fit into memory: the elements of one long array, or values one after the other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from data.turns import Refusal

_SPACE = " \t\r\n"
_TAIL = 16
"""Characters from the end within which a decoding error may just mean that the rest has not been read yet."""


class _Text:
    """A window over pieces of text; what has been decoded is let go."""

    def __init__(self, pieces: Iterator[str]) -> None:
        self._pieces = pieces
        self._decoder = json.JSONDecoder()
        self.buffer, self.at = "", 0

    def more(self) -> bool:
        """Read at least as much again as is waiting; False at the end."""
        waiting = self.buffer[self.at :]
        read = 0
        parts = [waiting]
        for piece in self._pieces:
            parts.append(piece)
            read += len(piece)
            if read and read >= len(waiting):
                break
        self.buffer, self.at = "".join(parts), 0
        return read > 0

    def skip(self, signs: str) -> str:
        """Pass over ``signs``; the character that stands then, empty at the end."""
        while True:
            while self.at < len(self.buffer) and self.buffer[self.at] in signs:
                self.at += 1
            if self.at < len(self.buffer):
                return self.buffer[self.at]
            if not self.more():
                return ""

    def value(self) -> Any:
        """Decode the value that stands here; a refusal if it is damaged or cut short."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self.buffer, self.at)
            except json.JSONDecodeError as error:
                unread = error.msg.startswith("Unterminated") or error.pos >= len(self.buffer) - _TAIL
                if unread and self.more():
                    continue
                return Refusal("not JSON", f"not JSON ({error.msg}); is the file cut short?")
            except RecursionError:
                return Refusal("not JSON", "nested too deeply to be read")
            if end == len(self.buffer) and self.more():  # a number may go on
                continue
            self.at = end
            return value


def elements(pieces: Iterator[str]) -> Iterator[Any]:
    """Elements of the array that ``pieces`` spell; the last may be a refusal, behind which nothing can be read."""
    text = _Text(pieces)
    text.skip(_SPACE)
    text.at += 1  # the opening bracket
    sign = text.skip(_SPACE)
    while sign != "]":
        if not sign:
            yield Refusal("not JSON", "not JSON (the array is not closed); is the file cut short?")
            return
        value = text.value()
        yield value
        sign = text.skip(_SPACE)
        if isinstance(value, Refusal) or sign not in ",]":
            if not isinstance(value, Refusal):
                yield Refusal("not JSON", "not JSON (no comma between two elements); the rest is not read")
            return
        if sign == ",":
            text.at += 1
            sign = text.skip(_SPACE)
    text.at += 1
    if text.skip(_SPACE):
        yield Refusal("not JSON", "something stands behind the array; it is not read")


def values(pieces: Iterator[str]) -> Iterator[Any]:
    """JSON values one after the other, over as many lines as they like; a refusal ends them."""
    text = _Text(pieces)
    while text.skip(_SPACE):
        value = text.value()
        yield value
        if isinstance(value, Refusal):
            return
