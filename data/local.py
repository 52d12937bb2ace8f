"""The local engine as one that answers conversations: many at a time, turn by turn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from data.completer import Completer
from data.render import Renderer
from data.rewrite import Answer, Rewriting
from data.turns import Refusal


@dataclass
class LocalAnswerer:
    """Answers with a :class:`Completer`; the conversations of a chunk are asked together.

    Chunks are formed in the order of the conversations' keys, so that the answers do not depend on the order of the
    rows. All conversations are held in memory.

    Attributes:
        max_tokens: most tokens an answer.
        seed: of the sampling; without a temperature it is not used.
        chunk: conversations asked together, and written together.
    """

    completer: Completer
    tokenizer: Any
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    chunk: int = 128

    def play(self, rewritings: Iterable[Rewriting]) -> Iterator[Rewriting]:
        """See :class:`data.rewrite.Answerer`."""
        renderer = Renderer(self.tokenizer)
        every = sorted(rewritings, key=lambda rewriting: rewriting.key)
        for at in range(0, len(every), self.chunk):
            part = every[at : at + self.chunk]
            turn = 0
            while pending := [one for one in part if one.pending]:
                self._ask(pending, renderer, int(part[0].key[:8], 16) + turn)
                turn += 1
            yield from part

    def _ask(self, pending: list[Rewriting], renderer: Renderer, number: int) -> None:
        asked, prompts = [], []
        for one in pending:
            try:
                prompts.append(renderer.prompt(one.prompt()))
                asked.append(one)
            except Refusal as refusal:
                one.take(Answer(error=str(refusal)))
        if not asked:
            return
        answers = self.completer.complete(
            prompts,
            max_new_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=(self.seed * 1_000_003 + number) % 2**31,
        )
        for one, answer in zip(asked, answers, strict=True):
            text = self.tokenizer.decode(answer.ids, skip_special_tokens=False)
            one.take(Answer(text, answer.finished, len(answer.ids)))
