"""Text while it comes: pieces whose concatenation is the decoded whole.

A token may hold part of a character, so a piece is given out only when what it adds is complete; what never becomes
complete comes out at the end as the decoder writes it. Each step decodes a few tokens, never the whole text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

UNFINISHED = "\ufffd"  # what decoders write for bytes that are no character (yet)
BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class TextPieces:
    """Turns tokens into pieces of text.

    Args:
        tokenizer: special tokens are skipped, as in ``Generation.texts``.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self._special = frozenset(tokenizer.all_special_ids)
        self._from = 0  # decoding starts here, a few tokens before what is new, because decoders look back
        self._given = 0  # tokens whose text has been given out
        self._length = 0  # characters given out

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete; may be empty."""
        self.ids += tokens
        before = decode(self.tokenizer, self.ids[self._from : self._given])
        now = decode(self.tokenizer, self.ids[self._from :])
        if len(now) <= len(before) or now.endswith(UNFINISHED) or self._in_bytes():
            return ""
        self._from, self._given = self._given, len(self.ids)
        piece = now[len(before) :]
        self._length += len(piece)
        return piece

    def _in_bytes(self) -> bool:
        """Whether the text ends in a byte token such as ``<0x0A>``: decoders judge a run of them as a whole."""
        for token in reversed(self.ids[self._given :]):
            name = None if token in self._special else self.tokenizer.convert_ids_to_tokens(token)
            if name:
                return BYTE.fullmatch(name) is not None
        return False

    def rest(self) -> str:
        """What is left when no token follows."""
        return decode(self.tokenizer, self.ids)[self._length :]


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """New text without special tokens; spaces stay as the tokens have them, so that pieces add up."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


class Sink(Protocol):
    """Where a running decode reports to."""

    def prompt(self, ids: Tensor) -> None:
        """The prompt (1, n), once, before anything is decoded."""
        ...

    def push(self, tokens: Sequence[int]) -> None:
        """Tokens just emitted."""
        ...

    def end(self) -> None:
        """Nothing follows."""
        ...


class StreamerSink:
    """A streamer of transformers: ``put`` for the prompt and each token as ``model.generate`` does, then ``end``."""

    def __init__(self, streamer: Any) -> None:
        self.streamer = streamer

    def prompt(self, ids: Tensor) -> None:
        """See :class:`Sink`."""
        self.streamer.put(ids.cpu())

    def push(self, tokens: Sequence[int]) -> None:
        """See :class:`Sink`."""
        for token in tokens:
            self.streamer.put(torch.tensor([token]))

    def end(self) -> None:
        """See :class:`Sink`."""
        self.streamer.end()


class TextSink:
    """A function that is called with each piece of text."""

    def __init__(self, function: Callable[[str], Any], tokenizer: Any) -> None:
        self.function, self.pieces = function, TextPieces(tokenizer)

    def prompt(self, ids: Tensor) -> None:
        """The prompt is not part of the text."""

    def push(self, tokens: Sequence[int]) -> None:
        """See :class:`Sink`."""
        self._give(self.pieces.push(tokens))

    def end(self) -> None:
        """See :class:`Sink`."""
        self._give(self.pieces.rest())

    def _give(self, piece: str) -> None:
        if piece:
            self.function(piece)


def make_sink(stream: Any, tokenizer: Callable[[], Any]) -> Sink | None:
    """What a user's ``stream=`` means: nothing, a transformers streamer, or a function of text pieces.

    Raises:
        ValueError: it is neither.
    """
    if stream is None:
        return None
    if callable(getattr(stream, "put", None)) and callable(getattr(stream, "end", None)):
        return StreamerSink(stream)
    if callable(stream):
        return TextSink(stream, tokenizer())
    raise ValueError(
        f"stream must be a function of text pieces or a transformers streamer, not {type(stream).__name__}"
    )
