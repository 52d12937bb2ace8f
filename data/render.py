"""Chat template → token ids and loss mask, by the boundaries of what the template renders.

A template's own ``{% generation %}`` marks are neither needed nor read (most templates have none, and a mask from
missing marks is all zero). Instead each answer lies between two renderings of the conversation's beginning:

    render(turns[:j], add_generation_prompt=True)   …<header of the answer>
    render(turns[:j+1])                             …<header of the answer>the answer<end of turn>\\n
                                                                           └─── mask is 1 ────┘

The first is exactly the prompt that decoding starts from. Only the answer and the end-of-turn token are
supervised: headers are given in decoding, and what follows the end of turn is never generated.

A template that renders earlier turns differently once later ones come (it takes their thoughts away) makes one
conversation several sequences: the answer of turn j is always learned in render(turns[:j+1]), as it was said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from data.template import Template, Tools
from data.turns import Conversation, Refusal, Turn


@dataclass(frozen=True)
class Rendered:
    """A sequence as the target reads it.

    Attributes:
        ids: token ids.
        mask: for each id, True where it is the assistant's own (answer or end of turn).
        finished: the last answer is whole, its end of turn is there.
        cut: tokens beyond ``max_length`` were taken away.
        last: place of the last supervised turn, which tells the sequences of one conversation apart.
        left_out: turns behind the conversation's last answer that stand in no sequence, since the template renders
            that answer differently before them; they would teach nothing.
    """

    ids: list[int]
    mask: list[bool]
    finished: bool
    cut: bool = False
    last: int = 0
    left_out: int = 0


@dataclass(frozen=True)
class _Span:
    """Where in a text an answer begins, where it stops, and where its end of turn does."""

    start: int
    stop: int
    end: int


@dataclass
class _View:
    """A text, and the answers that are learned in it, in order."""

    text: str
    spans: list[_Span]
    last: int
    left_out: int = 0


class Renderer:
    """Renders conversations with one tokenizer and its chat template.

    Raises:
        ValueError: see :class:`data.template.Template`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.template = Template(tokenizer)

    def render(
        self, turns: Sequence[Turn], *, tools: Tools = (), finished: bool = True, max_length: int | None = None
    ) -> list[Rendered]:
        """Token ids and loss mask of one conversation, equally long; each answer is supervised in exactly one sequence.

        Args:
            turns: the messages; more than one answer is fine.
            tools: descriptions of functions, for the template.
            finished: False when the last answer was cut: it is rendered without an end of turn.
            max_length: most tokens kept of a sequence, from the front: up to the end of its last whole answer, or,
                where not even the first fits, as much of that as does.

        Raises:
            Refusal: the template refuses the conversation, leaves something out of it, or renders an answer elsewhere
                than behind its generation prompt.
        """
        views = self._views(self.template.folded(turns), tools)
        made = [self._rendered(view, True, max_length) for view in views[:-1]]
        return [*made, self._rendered(views[-1], finished, max_length)]

    def prompt(self, turns: Sequence[Turn], tools: Tools = ()) -> list[int]:
        """Ids that decoding the answer to ``turns`` starts from."""
        return self._ids([self.template.opening(self.template.folded(turns), tools)])[0]

    def _views(self, turns: Sequence[Turn], tools: Tools) -> list[_View]:
        """From the last answer to the first: a text that still begins as the answer was said serves it as well."""
        answers = [j for j, turn in enumerate(turns) if turn.role == "assistant"]
        if not answers:
            raise Refusal("no answer", "the conversation has no assistant's turn")
        last = self.template.through(turns[: answers[-1] + 1], tools)
        text = last if answers[-1] == len(turns) - 1 else self.template.text(turns, tools)
        self.template.check(turns, text, tools)
        views = [_View(text, [], answers[-1])]
        for j in reversed(answers):
            through = last if j == answers[-1] else self.template.through(turns[: j + 1], tools)
            if not views[-1].text.startswith(through):
                views.append(_View(through, [], j))
            view = views[-1]
            span = _Span(self.template.before(turns[:j], through, tools), *self.template.end(through))
            if not span.start <= span.stop <= span.end <= (view.spans[0].start if view.spans else len(view.text)):
                raise Refusal("answer not found", "the chat template does not render the answer behind its header")
            view.spans.insert(0, span)
        if not views[0].spans:
            views[1].left_out = len(turns) - 1 - answers[-1]
        return [view for view in reversed(views) if view.spans]

    def _rendered(self, view: _View, finished: bool, max_length: int | None) -> Rendered:
        text = view.text if finished else view.text[: view.spans[-1].stop]
        ends = [span.end for span in view.spans[:-1]] + [view.spans[-1].end if finished else len(text)]
        starts = [span.start for span in view.spans]
        ids, places = self._tokenize(text, [bound for pair in zip(starts, ends, strict=True) for bound in pair])
        spans = list(zip(places[::2], places[1::2], strict=True))
        mask = [False] * len(ids)
        for start, end in spans:
            mask[start:end] = [True] * (end - start)
        cut = max_length is not None and len(ids) > max_length
        if max_length is not None and cut:
            borders = [end for _, end in spans if end <= max_length]
            finished = bool(borders) and (finished or len(borders) < len(spans))
            max_length = borders[-1] if borders else max_length
            ids, mask = ids[:max_length], mask[:max_length]
        return Rendered(ids, mask, finished, cut, view.last, view.left_out)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        """No special tokens are added: the template writes its own, a second BOS would be wrong."""
        return [list(ids) for ids in self.tokenizer(texts, add_special_tokens=False).input_ids]

    def _read(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def _tokenize(self, text: str, bounds: list[int]) -> tuple[list[int], list[int]]:
        """Ids of ``text``, and ``bounds`` (in characters, ascending) as places in the ids.

        Usually the ids of the pieces are a division of the ids. Where a merge would cross a bound, the pieces stay
        apart, as in decoding (prompt first, then token by token); that must still read as the same text. Tokenizers
        that begin every text with a space need the third way: beginnings in place of pieces.
        """
        edges = [0, *bounds, len(text)]
        whole, *pieces = self._ids([text, *(text[a:b] for a, b in pairwise(edges))])
        joined = [id for piece in pieces for id in piece]
        if joined != whole:
            beginnings = self._ids([text[:bound] for bound in bounds])
            if all(whole[: len(ids)] == ids for ids in beginnings):
                return whole, [len(ids) for ids in beginnings]
            if self._read(joined) != self._read(whole):
                raise Refusal("tokens cross a boundary", "the tokenizer joins an answer's end to what stands beside it")
        places, total = [], 0
        for piece in pieces[: len(bounds)]:
            total += len(piece)
            places.append(total)
        return joined, places


def render_text(tokenizer: Any, text: str, *, max_length: int | None = None) -> Rendered:
    """A document: all of it is learned, but for what the tokenizer puts in front of every text."""
    starts = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    ids = list(tokenizer(text, add_special_tokens=not starts).input_ids)
    given = int(bool(ids) and ids[0] == tokenizer.bos_token_id)
    ended = bool(tokenizer.eos_token) and ids[-1:] == [tokenizer.eos_token_id]
    cut = max_length is not None and len(ids) > max_length
    ids = ids[:max_length]
    return Rendered(ids, [False] * given + [True] * (len(ids) - given), ended and not cut, cut)


def sequences(
    conversation: Conversation, tokenizer: Any, renderer: Renderer | None, max_length: int | None
) -> list[Rendered]:
    """What is learned of one conversation or document: sequences with at least one supervised token.

    Args:
        renderer: for ``tokenizer``; None when it has no chat template, which only documents do without.

    Raises:
        Refusal: see :meth:`Renderer.render`; or nothing of it can be learned within ``max_length``.
    """
    if conversation.text is not None:
        made = [render_text(tokenizer, conversation.text, max_length=max_length)]
    elif renderer is None:
        raise Refusal("no chat template", f"the tokenizer {tokenizer.name_or_path!r} has no chat template")
    else:
        turns, tools, finished = conversation.turns, conversation.tools, conversation.finished
        made = renderer.render(turns, tools=tools, finished=finished, max_length=max_length)
    kept = [one for one in made if any(one.mask)]
    if not kept:
        raise Refusal("no answer within max_length", f"the first answer begins beyond {max_length} tokens")
    return kept
