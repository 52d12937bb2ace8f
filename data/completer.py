"""What data/ asks of anything that continues token sequences: the local engine or a served model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Completion:
    """Continuation of one prompt: its token ids (end-of-turn token not included), and whether the turn ended."""

    ids: list[int]
    finished: bool


class Completer(Protocol):
    """Continues prompts with the target. ``infer.completer.LocalCompleter`` is the one for a loaded model."""

    def complete(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> list[Completion]:
        """Continue each prompt until its turn ends or ``max_new_tokens`` are out.

        Args:
            prompts: token ids, one list a prompt; lengths may differ.
            max_new_tokens: most tokens a continuation may have.
            temperature: 0 for greedy, else plain sampling at this temperature with no truncation.
            seed: the same prompts, settings and seed give the same continuations.
        """
        ...
