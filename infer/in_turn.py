"""Several texts of a target that reads one text a pass: decoded one after another, behind the same interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infer.decode import Decoding
    from infer.rounds import Rounds


class InTurn:
    """Decodes each text alone, in order.

    Args:
        texts: of one target or of several.
        alone: makes the loop over a single text.
    """

    def __init__(self, texts: Sequence[Decoding], alone: Callable[[Sequence[Decoding]], Rounds]) -> None:
        self.texts, self.alone = list(texts), alone

    def run(self) -> Iterator[list[list[int]]]:
        """Decode; yields what each text emitted, as :meth:`infer.rounds.Rounds.run` does: [] for all but one.

        Raises:
            PositionLimit: the target has no position for the next token of a text (what was yielded stands).
        """
        for at, text in enumerate(self.texts):
            for (tokens,) in self.alone([text]).run():
                emitted: list[list[int]] = [[] for _ in self.texts]
                emitted[at] = tokens
                yield emitted
