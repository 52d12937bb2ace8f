"""Marked text: without marks it is the text, each token is marked by its round, live and afterwards alike."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

import pytest
import torch

from heads.draft import Draft
from infer import show
from infer.metrics import Round, Stats


class Bytes:
    """A tokenizer whose ids are bytes; 256 is special."""

    all_special_ids = (256,)

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(token)

    def decode(self, ids: Sequence[int], **kwargs: bool) -> str:
        assert kwargs["skip_special_tokens"]
        return bytes(i for i in ids if i < 256).decode(errors="replace")


def rounds(*pairs: tuple[int, int]) -> list[Round]:
    return [Round(proposed=3, depth=3, accepted=accepted, emitted=emitted) for accepted, emitted in pairs]


def bare(text: str) -> str:
    return re.sub(r"[⟦⟧]|\x1b\[[0-9;]*m", "", text)


def test_marks_follow_the_rounds() -> None:
    assert show.flags([]) == [False]
    log = rounds((2, 3), (0, 1), (2, 2))
    assert show.flags(log) == [False, True, True, False, False, True, True]
    assert show.render(list(b"abcdefg"), log, Bytes(), colour=False) == "a⟦bc⟧de⟦fg⟧"


@pytest.mark.parametrize("colour", [True, False])
@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5])
def test_without_marks_it_is_the_text_whole_characters_only(colour: bool, cut: int) -> None:
    ids = [*"é😀\nx".encode(), 256]
    log = rounds(*([(0, 1)] * (cut - 1)), (len(ids) - cut, len(ids) - cut))
    text = show.render(ids, log, Bytes(), colour)
    assert bare(text) == "é😀\nx"


def test_a_text_that_really_ends_in_half_a_character_keeps_it() -> None:
    assert bare(show.render(list("a😀".encode())[:-1], rounds((2, 3)), Bytes(), colour=False)) == "a\ufffd"


def test_no_ground_across_a_line_end() -> None:
    text = show.render(list(b"ab\ncd"), rounds((3, 4)), Bytes(), colour=True)
    on, off = show.COLOUR
    assert text == f"a{on}b{off}\n{on}c{off}d"


def test_a_log_of_another_generation_is_an_error() -> None:
    with pytest.raises(ValueError, match="another generation"):
        show.render([1, 2, 3], [], Bytes(), colour=False)


def test_live_marks_follow_the_draft() -> None:
    drafts: list[Draft] = []
    written: list[str] = []
    stream = show.MarkedStream(lambda: drafts[-1] if drafts else None, show.Marker(Bytes(), False), written.append)
    stream.put(torch.tensor([[1, 2, 3]]))  # the prompt
    for draft, tokens in (
        (None, "a"),
        (Draft.chain(list(b"bcd")), "bcx"),
        (Draft(tuple(b"pqr"), (-1, -1, 1), (None,) * 3), "qrs"),
        (Draft.chain(list(b"k")), "z"),
        (None, "k"),  # a round without a draft: the last one says nothing about its token
    ):
        if draft is not None:
            drafts.append(draft)
        for byte in tokens.encode():
            stream.put(torch.tensor([byte]))
    stream.end()
    assert "".join(written) == "a⟦bc⟧x⟦qr⟧szk"


def test_colour_only_on_a_terminal_that_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert show.wants_colour(Terminal())
    assert not show.wants_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not show.wants_colour(Terminal())


def test_the_caption_counts() -> None:
    assert "2.00 tokens per round, 3 rounds" in show.caption(
        Stats(7, 0.1, log=rounds((2, 3), (0, 1), (1, 2))), colour=False
    )
    assert "no round" in show.caption(Stats(1, 0.1, log=[]), colour=False)
