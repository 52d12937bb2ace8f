"""Which of the target's layers should draft for it: a small search on sample prompts.

The target's own greedy answers are the yardstick. A subset of layers reads prompt and answer in one pass; the share
of answer tokens at which its arg-max is the target's token is its acceptance. That pass is exactly what the drafter
computes behind committed text, so the figure is that of a draft's first token. Two kinds of subsets are tried:

1. the first k layers, for every k-th that is a multiple of a block (a tenth of the layers);
2. greedy removal: from all layers on, again and again, the block is left out whose loss costs least acceptance.

Seconds are measured for two sizes of subset and lie on the straight line through them for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from heads.target import Target
from infer.costs import measure_costs
from infer.drafters.early_layers import EarlyLayersDrafter, format_layers
from infer.drafters.none import NoDrafter
from infer.generate import generate
from infer.lookahead import CostTable

DEEPEST = 8  # look-ahead up to which the expected speed-up is computed
ROWS = (1, 2, 4, 8)  # rows of the target's pass that are timed
LOGIT_ROWS = 256  # rows whose logits over the whole vocabulary are held at once


class Found(NamedTuple):
    """One subset and what it is worth.

    Attributes:
        layers: their numbers.
        acceptance: share of the sample's answer tokens that the layers would have drafted.
        cost: seconds of one more drafted token over those of a plain step of the target.
        speedup: expected tokens a second over plain decoding's, at the best look-ahead; below 1 it does not pay.
        lookahead: that look-ahead.
    """

    layers: tuple[int, ...]
    acceptance: float
    cost: float
    speedup: float
    lookahead: int

    @property
    def spec(self) -> str:
        """What ``draft=`` takes."""
        return f"layers:{format_layers(self.layers)}"


def search(
    target: Target,
    prompts: Sequence[Tensor],
    budget: int = 64,
    *,
    new_tokens: int = 48,
    costs: Mapping[int, CostTable] | None = None,
) -> list[Found]:
    """Try subsets of the target's layers.

    Args:
        target: the model; its layers must be able to run in part.
        prompts: token ids, each (1, n).
        budget: most subsets to try, the first layers before the greedy removal.
        new_tokens: length of the answers they are judged on.
        costs: number of layers → a cost table with drafts of that many; measured behind the longest prompt by default.

    Returns:
        What was tried, the fastest first.

    Raises:
        ValueError: no prompts, no answer tokens, a target of one layer, or one whose layers cannot be run in part.
    """
    if not prompts:
        raise ValueError("a search for layers needs prompts to try them on")
    if target.num_layers < 2:
        raise ValueError(f"{target.name} has a single layer: none can be left out")
    sample = _Sample(target, prompts, new_tokens)
    tables = costs if costs is not None else _measure(target, max(prompts, key=lambda ids: ids.shape[1]))
    tried: dict[tuple[int, ...], float] = {}

    def judge(layers: Sequence[int]) -> float:
        key = tuple(layers)
        if key not in tried:
            tried[key] = sample.acceptance(key)
        return tried[key]

    for _ in _candidates(target.num_layers, judge):
        if len(tried) >= budget:
            break
    found = [_found(layers, acceptance, tables) for layers, acceptance in tried.items()]
    return sorted(found, key=lambda one: one.speedup, reverse=True)


def _candidates(count: int, judge: Callable[[Sequence[int]], float]) -> Iterator[None]:
    """Judge one subset after another; the caller may stop after each."""
    block = max(1, count // 10)
    for k in range(block, count, block):
        judge(range(k))
        yield
    left = list(range(count))
    while len(left) > block:
        best: tuple[float, list[int]] = (-1.0, left)
        for start in range(0, len(left), block):
            rest = left[:start] + left[start + block :]
            best = max(best, (judge(rest), rest))
            yield
        left = best[1]


class _Sample:
    """The target's answers, and whether a subset of its layers would have said the same.

    Attributes:
        ids: (B, T) prompts with answers, padded on the right, where no row before it can see it.
        asked: (B, T) bool, True where the next token is one of the answer's.
    """

    def __init__(self, target: Target, prompts: Sequence[Tensor], new_tokens: int) -> None:
        self.target = target
        texts = [
            generate(target, ids, draft=NoDrafter(), max_new_tokens=new_tokens, do_sample=False).sequences[0]
            for ids in prompts
        ]
        width = max(len(text) for text in texts)
        self.ids = torch.zeros(len(texts), width, dtype=torch.long, device=target.device)
        self.asked = torch.zeros(len(texts), width, dtype=torch.bool, device=target.device)
        for row, (ids, text) in enumerate(zip(prompts, texts, strict=True)):
            self.ids[row, : len(text)] = text
            self.asked[row, ids.shape[1] - 1 : len(text) - 1] = True
        self.said = self.ids.roll(-1, 1)[self.asked]

    @torch.inference_mode()
    def acceptance(self, layers: Sequence[int]) -> float:
        """Share of answer tokens that are the layers' arg-max."""
        hidden = self.target.partial(layers)(self.ids)[self.asked]
        drafted = torch.cat([self.target.project(part).argmax(-1) for part in hidden.split(LOGIT_ROWS)])
        return float((drafted == self.said).float().mean())


def _measure(target: Target, ids: Tensor) -> dict[int, CostTable]:
    """Cost tables of a small and of a larger subset."""
    small = max(1, target.num_layers // 10)
    return {
        k: measure_costs(target, EarlyLayersDrafter(target, range(k)), ids, depth=4, rows=ROWS, widths=(1,), repeats=5)
        for k in sorted({small, max(1, target.num_layers // 2)})
    }


def _found(layers: tuple[int, ...], acceptance: float, tables: Mapping[int, CostTable]) -> Found:
    few, many = min(tables), max(tables)
    table = tables[few]

    def draft(depth: int) -> float:
        low, high = tables[few].draft(depth, 1), tables[many].draft(depth, 1)
        return low + (high - low) * (len(layers) - few) / max(1, many - few)

    def speedup(depth: int) -> float:
        tokens = sum(acceptance**i for i in range(depth + 1))
        return tokens * table.target(1) / (draft(depth) + table.target(depth + 1))

    best = max(range(1, DEEPEST + 1), key=speedup)
    return Found(layers, acceptance, (draft(4) - draft(1)) / 3 / table.target(1), speedup(best), best)
