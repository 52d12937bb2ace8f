"""A tokenizer's chat template as a function from turns to text, and what it writes around an answer."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from data.messages import REASONING_KEYS
from data.turns import END_THINK, THINK, Refusal, ToolCall, Turn

PROBE = "\u2063probe\u2063"
DATE = datetime.datetime(2024, 7, 26)
"""What templates that write today's date are told, so that the same data give the same tokens tomorrow."""
_TODAY = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")

Tools = Sequence[Mapping[str, Any]]


class Template:
    """The chat template of one tokenizer.

    Attributes:
        closing: what it writes behind an answer: end of turn, and perhaps more.
        end_of_turn: the beginning of that, through its first special token; empty when it has none.

    Raises:
        ValueError: the tokenizer has no chat template, or the template does not show an answer's text.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template: it cannot render conversations"
            )
        self.tokenizer = tokenizer
        self.special = sorted(
            ({str(token) for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens))
            - {""}
        )
        source = json.dumps(tokenizer.chat_template, ensure_ascii=False)
        self._reasoning_key = next((key for key in REASONING_KEYS if key in source), None)
        self._folds = self._reasoning_key is None and END_THINK in source
        self._sources: dict[bool, str] = {}
        asked = [Turn("user", "a")]
        whole = self.text([*asked, Turn("assistant", PROBE)])
        if PROBE not in whole:
            raise ValueError(f"the chat template of {tokenizer.name_or_path!r} does not show an answer's text")
        before, self.closing = whole.split(PROBE, 1)
        self.end_of_turn = self._through_special(self.closing)
        opening = self.text(asked, generation=True)
        self._prompts = opening != self.text(asked)
        self._inserts = not self._prompts or before != opening

    def folded(self, turns: Sequence[Turn]) -> list[Turn]:
        """Reasoning kept apart, put into the content for a template that knows thoughts only there."""
        return [
            replace(turn, content=f"{THINK}\n{turn.reasoning}\n{END_THINK}\n\n{turn.content}", reasoning="")
            if turn.reasoning and self._folds
            else turn
            for turn in turns
        ]

    def text(self, turns: Sequence[Turn], tools: Tools = (), *, generation: bool = False) -> str:
        """Render; with ``generation``, the header of an answer to come stands at the end.

        Raises:
            Refusal: the template refuses the turns, or has no place for an answer's reasoning.
        """
        messages = [self._message(turn) for turn in turns]
        return self._apply(messages, tools, generation)

    def _apply(self, messages: list[dict[str, Any]], tools: Tools, generation: bool) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=[dict(tool) for tool in tools] or None,
                chat_template=self._source(bool(tools)),
                tokenize=False,
                add_generation_prompt=generation,
            )
        except Exception as error:  # a template is a program of others and may fail in any way
            raise Refusal("refused by the template", f"the chat template refused the conversation: {error}") from error
        return str(text)

    def _source(self, with_tools: bool) -> str:
        """The template that the tokenizer chooses, with a fixed date in place of today's."""
        if with_tools not in self._sources:
            chosen = str(self.tokenizer.get_chat_template(None, [{}] if with_tools else None))
            self._sources[with_tools] = _TODAY.sub(lambda found: repr(DATE.strftime(found[2])), chosen)
        return self._sources[with_tools]

    def _message(self, turn: Turn) -> dict[str, Any]:
        message: dict[str, Any] = {"role": turn.role, "content": turn.content}
        if turn.calls:
            message["tool_calls"] = [self._call(call, self._arguments) for call in turn.calls]
        if turn.reasoning:
            if self._reasoning_key is None:
                raise Refusal("reasoning has no place", "the chat template has no place for an answer's reasoning")
            message[self._reasoning_key] = turn.reasoning
        extra = {"name": turn.name, "tool_call_id": turn.call_id}
        return message | {key: value for key, value in extra.items() if value is not None}

    @staticmethod
    def _call(call: ToolCall, written: Callable[[Mapping[str, Any]], Any]) -> dict[str, Any]:
        described = {"type": "function", "function": {"name": call.name, "arguments": written(call.arguments)}}
        return described if call.id is None else described | {"id": call.id}

    @cached_property
    def _arguments(self) -> Callable[[Mapping[str, Any]], Any]:
        """How this template wants a call's arguments: as an object, or, where that fails or shows Python, as JSON."""
        arguments = {"probe": "x"}
        call = self._call(ToolCall("probe", arguments), dict)
        messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        try:
            shown = self._apply(messages, (), generation=False)
        except Refusal:
            return _as_json
        return _as_json if str(arguments) in shown else dict

    def _through_special(self, closing: str) -> str:
        found = [(closing.index(token), -len(token)) for token in self.special if token in closing]
        if not found:
            return ""
        at, length = min(found)
        return closing[: at - length]

    def opening(self, turns: Sequence[Turn], tools: Tools = ()) -> str:
        """All that stands before the answer to ``turns`` in decoding: the prompt.

        A template without a generation prompt, and an answer that nothing precedes, are asked with a probe instead.
        """
        if turns and self._prompts:
            return self.text(turns, tools, generation=True)
        return self.text([*turns, Turn("assistant", PROBE)], tools).split(PROBE, 1)[0]

    def before(self, turns: Sequence[Turn], answer: str, tools: Tools = ()) -> int:
        """How many characters of ``answer``, a rendering that ends with the answer to ``turns``, are not its own.

        That is the prompt, or more where the template inserts something into an answer that lacks it (an empty
        block of thoughts): it was given, not said. Zero with a refusal when neither is found in front.
        """
        found = [self.opening(turns, tools)]
        if self._inserts and turns:
            found.append(self.text([*turns, Turn("assistant", PROBE)], tools).split(PROBE, 1)[0])
        fitting = [len(text) for text in found if answer.startswith(text)]
        if not fitting:
            raise Refusal("answer not found", "the chat template does not render the answer behind its header")
        return max(fitting)

    def through(self, turns: Sequence[Turn], tools: Tools = ()) -> str:
        """A rendering of turns that end with an answer, all of the answer in it.

        Where the template takes thoughts out of even a last answer, the prompt, the answer as it was said, and the
        end of turn are put together: that is what the target reads when it has said it.

        Raises:
            Refusal: the template leaves out something else of the answer.
        """
        answer = turns[-1]
        text = self.text(turns, tools)
        if _shows(text, answer.words):
            return text
        opening = self.opening(turns[:-1], tools)
        said = answer.content
        if opening.rstrip().endswith(THINK):
            said = said.lstrip().removeprefix(THINK).lstrip("\n")
        text = opening + said + self.closing
        if END_THINK not in answer.content or not _shows(text, answer.words):
            raise Refusal("template leaves out a turn", f"the chat template does not show all of {_quoted(answer)}")
        return text

    def check(self, turns: Sequence[Turn], text: str, tools: Tools = ()) -> None:
        """Refuse a rendering in which something of the conversation is missing."""
        for turn in turns:
            if not _shows(text, turn.lasting_words):
                raise Refusal("template leaves out a turn", f"the chat template does not show {_quoted(turn)}")
        if not _shows(text, [str(tool.get("function", tool).get("name") or "") for tool in tools]):
            raise Refusal("template shows no tools", "the chat template has no place for the row's tools")

    def end(self, text: str) -> tuple[int, int]:
        """Where the answer at the end of a rendering stops, without and with its end of turn."""
        if text.endswith(self.closing):
            stop = len(text) - len(self.closing)
            return stop, stop + len(self.end_of_turn)
        trimmed = text.rstrip()
        last = max((token for token in self.special if trimmed.endswith(token)), key=len, default="")
        if not last and self.end_of_turn:
            raise Refusal("answer not found", "the chat template does not end the answer as it ends others")
        return len(trimmed) - len(last), len(trimmed)


def _as_json(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _shows(text: str, words: Sequence[str]) -> bool:
    """Whether every word stands in the text, as it is or as it stands within JSON."""
    return all(word in text or json.dumps(word, ensure_ascii=False)[1:-1] in text for word in words)


def _quoted(turn: Turn) -> str:
    said = turn.content or ", ".join(call.name for call in turn.calls)
    return f"the {turn.role}'s turn {said[:40]!r}"
