"""When to stop, asked token by token: nothing after an end of sequence, a stop string or the length is emitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria

from infer.tokens import Tokens

Scores = tuple[Tensor, ...] | None


@dataclass
class Stop:
    """Stopping conditions of one call.

    Attributes:
        max_length: tokens of prompt and answer together.
        eos: ids that end the text; they are emitted.
        others: further criteria of transformers or the user, called as ``model.generate`` calls them.
    """

    max_length: int
    eos: frozenset[int] = frozenset()
    others: list[Callable[[Tensor, Scores], Tensor]] = field(default_factory=list)

    @classmethod
    def from_criteria(cls, criteria: Sequence[StoppingCriteria], max_length: int) -> Stop:
        """Length and end of sequence, the usual ones, are taken apart so that they cost nothing a token."""
        stop = cls(max_length)
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                stop.eos |= frozenset(torch.as_tensor(criterion.eos_token_id).flatten().tolist())
            elif type(criterion) is MaxLengthCriteria:
                stop.max_length = min(stop.max_length, criterion.max_length)
            else:
                stop.others.append(criterion)
        return stop

    def left(self, tokens: Tokens) -> int:
        """Tokens that may still be emitted."""
        return self.max_length - len(tokens)

    def reached(self, tokens: Tokens, scores: Scores = None) -> bool:
        """Whether the last of ``tokens`` ends the text; asked once after each token, in order."""
        done = len(tokens) >= self.max_length or tokens.last in self.eos
        for criterion in self.others:  # each is asked every time: some count their calls
            done |= bool(torch.as_tensor(criterion(tokens.view(), scores)).all())
        return done
