"""Many rounds by counting: at each decision it is drawn how many of the rounds that got there go which way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from infer.verify import Rule
from tests.infer.exact import Make, TableAt, Text
from tests.infer.fakes import Branching, enumerate_law


class Splitting(Branching):
    """Follows many rounds at once: how many of them go which way is drawn, anew for every decision."""

    def __init__(self, script: Sequence[int], draws: int, ways: dict[Text, list[int]], random: Any) -> None:
        super().__init__(script)
        self.count, self._ways, self._random = draws, ways, random

    def _choose(self, weights: list[tuple[int, float]]) -> int:
        key = tuple(self.taken)
        if key not in self._ways:
            shares = [weight for _, weight in weights]
            self._ways[key] = self._random.multinomial(self.count, [share / sum(shares) for share in shares]).tolist()
        taken = [(answer, count) for (answer, _), count in zip(weights, self._ways[key], strict=True) if count]
        choice = self.script[len(key)] if len(key) < len(self.script) else 0
        self.taken.append(choice)
        self.options.append(len(taken))
        answer, self.count = taken[choice]
        return answer


def draw_rounds(
    rule: Rule, make: Make, p_after: Callable[[Text], Tensor], text: Text, draws: int, seed: int = 0
) -> tuple[Counter[Text], int]:
    """What ``draws`` independent rounds emit, and how many of them reject."""
    emitted: Counter[Text] = Counter()
    rejected = 0
    ways: dict[Text, list[int]] = {}
    random = np.random.default_rng(seed)

    def run(chooser: Branching) -> None:
        nonlocal rejected
        assert isinstance(chooser, Splitting)
        draft = make(chooser, text)
        path, own = rule(draft, TableAt(p_after, text, draft), chooser)
        emitted[*(draft.tokens[node] for node in path), own] += chooser.count
        rejected += chooser.count * bool(draft.children(path[-1] if path else -1))

    enumerate_law(run, lambda script: Splitting(script, draws, ways, random))
    return emitted, rejected
