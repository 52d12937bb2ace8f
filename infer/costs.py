"""The clock side of look-ahead: what this machine pays for a target pass over N rows and for a draft.

Both are read from real rounds of the real loop, so masks, processors, verification and the compaction of the cache
are in the figures. Sizes are interleaved and medians taken, since a shared machine drifts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from heads.draft import Draft
from heads.grow import Budget, Sampler
from heads.target import Target
from infer.decode import Decoding
from infer.drafters import Drafter
from infer.lookahead import CostTable
from infer.metrics import Round
from infer.stopping import Stop

Size = TypeVar("Size")

ROWS = (1, 2, 4, 8, 16, 32, 64)
WIDTHS = (1, 8)


class Filler:
    """Proposes arbitrary tokens, as many as the budget allows, at no cost: what remains of a round is the target's.

    Args:
        taps: hidden states to ask of the target, since keeping them is part of a pass.
        vocab_size: ids are below it.
    """

    lookahead = 1
    module_seconds = 0.0

    def __init__(self, taps: tuple[int, ...], vocab_size: int) -> None:
        self.taps = taps
        self._vocab = vocab_size
        self._draw = torch.Generator().manual_seed(0)

    def begin(self, target: Target, ids: Tensor, taps: Tensor | None) -> None:
        """Nothing to read."""

    def propose(self, budget: Budget, sampler: Sampler | None) -> Draft:
        """A chain that fills the budget's rows."""
        return Draft.chain(torch.randint(self._vocab, (budget.rows - 1,), generator=self._draw).tolist())

    def commit(self, taps: Tensor | None, ids: list[int]) -> None:
        """Nothing to keep."""

    def fork(self) -> Filler:
        """Another that proposes the same tokens from the start."""
        return Filler(self.taps, self._vocab)


def measure_costs(
    target: Target,
    drafter: Drafter,
    ids: Tensor,
    *,
    depth: int | None = None,
    rows: Sequence[int] = ROWS,
    widths: Sequence[int] = WIDTHS,
    repeats: int = 7,
) -> CostTable:
    """Time rounds of the loop behind the prompt ``ids`` (1, n).

    Args:
        target: what decodes.
        drafter: what drafts; one that proposes nothing has no draft costs.
        ids: a prompt of typical length.
        depth: deepest draft to time; the drafter's own look-ahead by default.
        rows: rows of the target pass to time.
        widths: widths of trees to time; 1 is a chain.
        repeats: rounds timed of each size.

    Returns:
        Seconds by size, medians.

    Raises:
        ValueError: the target has too few positions for the rounds to time.
    """
    depth = drafter.lookahead if depth is None else depth
    sizes = [Budget.chain(n - 1) for n in rows]
    filler = Filler(tuple(drafter.taps), target.vocab_size)
    passes = _rounds(target, filler, ids, sizes * (repeats + 1))[len(sizes) :]  # the first of each size warms up
    grid = [(d, w) for w in widths for d in sorted({1, max(1, depth // 2), depth})] if depth else []
    shapes = [Budget(rows=d + 1 if w == 1 else max(rows), depth=d, width=w) for d, w in grid]
    drafts = _rounds(target, drafter, ids, shapes * (repeats + 1))[len(shapes) :] if grid else []
    return CostTable(
        rows=_medians(list(rows), passes, lambda r: r.seconds - r.draft_total_seconds),
        drafts=_medians(grid, drafts, lambda r: r.draft_total_seconds),
        context=ids.shape[1],
        settings=settings(target),
    )


def settings(target: Target) -> dict[str, str | int]:
    """Where timings hold: device, dtype, threads, attention kernel, library versions."""
    import transformers

    return {
        "device": str(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "attention": str(getattr(target.model.config, "_attn_implementation", "unknown")),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _rounds(target: Target, drafter: Drafter, ids: Tensor, budgets: Sequence[Budget]) -> list[Round]:
    """Decode one round under each of ``budgets`` in turn, behind the same prompt."""
    most = ids.shape[1] + 2 + sum(budget.depth + 1 for budget in budgets)
    if target.max_positions is not None and most > target.max_positions:
        raise ValueError(
            f"timing needs up to {most} positions and {target.name} has {target.max_positions}: "
            "use a shorter prompt, fewer sizes or fewer repeats"
        )
    decoding = Decoding(target, ids.to(target.device), drafter, budgets[0], Stop(most))
    rounds = decoding.run()
    next(rounds)
    for decoding.budget in budgets:
        next(rounds)
    return decoding.stats.log


def _medians(sizes: Sequence[Size], rounds: Sequence[Round], seconds: Callable[[Round], float]) -> dict[Size, float]:
    return {size: statistics.median(map(seconds, rounds[at :: len(sizes)])) for at, size in enumerate(sizes)}
