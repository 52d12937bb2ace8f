"""Chat template → token ids and loss mask, by the boundaries of what the template renders.

A template's own ``{% generation %}`` marks are neither needed nor read (most templates have none, and a mask from
missing marks is all zero). Instead each answer lies between two renderings of the conversation's beginning:

    render(turns[:j], add_generation_prompt=True)   …<header of the answer>
    render(turns[:j+1])                             …<header of the answer>the answer<end of turn>\\n
                                                                           └─── mask is 1 ────┘

The first is exactly the prompt that decoding starts from. Only the answer and the end-of-turn token are
supervised: headers are given in decoding, and what follows the end of turn is never generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jinja2

from data.conversation import Refusal, Turn

_PROBE = "\u2063probe\u2063"


@dataclass(frozen=True)
class Rendered:
    """One conversation as the target reads it.

    Attributes:
        ids: token ids.
        mask: for each id, True where it is the assistant's own (answer or end of turn).
        finished: the last answer is whole, its end of turn is there.
        cut: tokens beyond ``max_length`` were taken away.
    """

    ids: list[int]
    mask: list[bool]
    finished: bool
    cut: bool = False


class Renderer:
    """Renders conversations with one tokenizer and its chat template.

    Raises:
        ValueError: the tokenizer has no chat template, or the template does not show an answer's text.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template: it cannot render conversations"
            )
        self.tokenizer = tokenizer
        asked, answered = Turn("user", "a"), Turn("assistant", _PROBE)
        whole = self._text([asked, answered])
        if _PROBE not in whole:
            raise ValueError(f"the chat template of {tokenizer.name_or_path!r} does not show an answer's text")
        before, self.closing = whole.split(_PROBE, 1)
        """What the template writes behind an answer: end of turn, and perhaps more."""
        self.end_of_turn = self._end_of_turn(self.closing)
        opening = self._text([asked], generation=True)
        self._prompts = opening != self._text([asked]) and before.startswith(opening)

    def _text(self, turns: Sequence[Turn], *, generation: bool = False) -> str:
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
        except (jinja2.TemplateError, TypeError) as error:
            raise Refusal("refused by the template", f"the chat template refused the conversation: {error}") from error
        return str(text)

    def _end_of_turn(self, closing: str) -> str:
        """The beginning of ``closing`` through its first special token; empty when there is none."""
        tokenizer = self.tokenizer
        special = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
        found = [(closing.index(token), -len(token)) for token in special if token and token in closing]
        if not found:
            return ""
        at, length = min(found)
        return closing[: at - length]

    def _opening(self, turns: Sequence[Turn]) -> str:
        """All that stands before the answer to ``turns``: the prompt that decoding starts from.

        A template without a generation prompt, and an answer that nothing precedes, are asked with a probe instead.
        """
        if turns and self._prompts:
            return self._text(turns, generation=True)
        return self._text([*turns, Turn("assistant", _PROBE)]).split(_PROBE, 1)[0]

    def render(self, turns: Sequence[Turn], *, finished: bool = True, max_length: int | None = None) -> Rendered:
        """Token ids and loss mask of one conversation, equally long.

        Args:
            turns: the messages; more than one answer is fine, each is supervised.
            finished: False when the last answer was cut: it is rendered without an end of turn.
            max_length: most tokens kept, from the front; turns before the limit stay supervised.

        Raises:
            Refusal: the template refuses the conversation, rewrites earlier turns when later ones come, or renders
                an answer elsewhere than behind its generation prompt.
        """
        text, spans = self._spans(turns, finished)
        ids, bounds = self._tokenize(text, [bound for span in spans for bound in span])
        mask = [False] * len(ids)
        for start, end in zip(bounds[::2], bounds[1::2], strict=True):
            mask[start:end] = [True] * (end - start)
        cut = max_length is not None and len(ids) > max_length
        if cut:
            finished = finished and bool(bounds) and bounds[-1] <= (max_length or 0)
            ids, mask = ids[:max_length], mask[:max_length]
        return Rendered(ids, mask, finished, cut)

    def _spans(self, turns: Sequence[Turn], finished: bool) -> tuple[str, list[tuple[int, int]]]:
        """The rendered text, and where in it the supervised characters of each answer lie."""
        text = self._text(turns)
        spans = []
        for j, turn in enumerate(turns):
            if turn.role != "assistant":
                continue
            opening, through = self._opening(turns[:j]), self._text(turns[: j + 1])
            if not text.startswith(through):
                raise Refusal("template rewrites turns", "the chat template renders earlier turns differently later on")
            end = len(through) - len(self.closing)
            if not through.startswith(opening) or not through.endswith(self.closing) or end < len(opening):
                raise Refusal("answer not found", "the chat template does not render the answer behind its header")
            spans.append((len(opening), end + len(self.end_of_turn)))
        if not finished:
            start, end = spans[-1]
            spans[-1] = (start, end - len(self.end_of_turn))
            text = text[: spans[-1][1]]
        return text, spans

    def _ids(self, texts: list[str]) -> list[list[int]]:
        """No special tokens are added: the template writes its own, a second BOS would be wrong."""
        return [list(ids) for ids in self.tokenizer(texts, add_special_tokens=False).input_ids]

    def _read(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def _tokenize(self, text: str, bounds: list[int]) -> tuple[list[int], list[int]]:
        """Ids of ``text``, and ``bounds`` (in characters, ascending) as places in the ids.

        Usually the ids of a beginning are a beginning of the ids. Where a merge would cross a bound, the pieces are
        tokenized apart, as decoding does (prompt first, then token by token); that must still read as the same text.
        """
        whole, *beginnings = self._ids([text, *(text[:bound] for bound in bounds)])
        if all(whole[: len(ids)] == ids for ids in beginnings):
            return whole, [len(ids) for ids in beginnings]
        edges = [0, *bounds, len(text)]
        pieces = self._ids([text[a:b] for a, b in pairwise(edges)])
        joined = [id for piece in pieces for id in piece]
        if self._read(joined) != self._read(whole):
            raise Refusal("tokens cross a boundary", "the tokenizer joins an answer's end to what stands beside it")
        places = [sum(map(len, pieces[: i + 1])) for i in range(len(bounds))]
        return joined, places
