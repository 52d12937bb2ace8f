"""The clock side of look-ahead: what this machine pays for a target pass over N rows and for a draft.

Both are read from real rounds of the real loop, so masks, processors, verification and the compaction of the cache
are in the figures. Sizes are interleaved and medians taken, since a shared machine drifts; where a pass over more rows
still looks cheaper than one over fewer, that is noise, and it is given the dearer one's seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from heads.draft import Draft
from heads.grow import Budget, Sampler
from heads.target import Target
from infer.decode import Decoding
from infer.drafters import Drafter
from infer.drafters.inside import inside_of
from infer.lookahead import CostTable
from infer.metrics import Round
from infer.progress import progress
from infer.rounds import Rounds
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
    filler = Filler(tuple(drafter.taps), target.vocab_size)
    passes = _rounds(target, filler, ids, [Budget.chain(n - 1) for n in rows], repeats)
    inside = inside_of(drafter)
    depths = sorted({1, max(1, depth // 2), depth}) if depth else []
    grid = [(d, w) for w in (widths if inside is None else (1,)) for d in depths]
    shapes = [
        inside.usual(d) if inside is not None else Budget(rows=d + 1 if w == 1 else max(rows), depth=d, width=w)
        for d, w in grid
    ]
    drafts = _rounds(target, drafter, ids, shapes, repeats) if grid else []
    seconds = _medians(list(rows), passes, _outside_drafts)
    if inside is not None:  # its rows are not the target's alone
        seconds |= _medians([shape.rows for shape in shapes], drafts, _outside_drafts)
    return CostTable(
        rows=_rising(seconds),
        drafts=_medians(grid, drafts, lambda r: r.draft_total_seconds),
        context=ids.shape[1],
        settings=settings(target),
    )


def measure_batches(
    target: Target,
    ids: Tensor,
    batches: Sequence[int],
    *,
    rows: Sequence[int] = ROWS,
    taps: tuple[int, ...] = (),
    repeats: int = 5,
) -> dict[int, dict[int, float]]:
    """Seconds of a pass over each of ``batches`` texts with each of ``rows`` rows, :attr:`CostTable.batches`.

    Args:
        ids: (1, n) prompt that stands in for every text.
        taps: hidden states asked of the target, as a drafter would.

    Raises:
        ValueError: the target has too few positions.
    """
    sizes = [Budget.chain(n - 1) for n in rows]
    filler = Filler(taps, target.vocab_size)
    return {
        batch: _rising(
            _medians(
                list(rows),
                _rounds(target, filler, ids, sizes, repeats, batch),
                _outside_drafts,
            )
        )
        for batch in progress(batches, len(batches), "timing batches")
    }


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


def where(report: Mapping[str, Any]) -> str:
    """The head of a table: which target, on what; ``report`` has ``target`` and ``settings``."""
    at = report["settings"]
    return f"{report['target']} ({at['dtype']}, {at['device']}, {at['threads']} threads)"


def _rounds(
    target: Target, drafter: Drafter, ids: Tensor, budgets: Sequence[Budget], repeats: int, batch: int = 1
) -> list[Round]:
    """Rounds of ``batch`` texts under each of ``budgets`` in turn, ``repeats`` times over; seconds are of all texts.

    Each text starts behind the prompt; it starts anew where the target's positions are spent.
    """
    once = 2 + sum(budget.depth + 1 for budget in budgets)
    room = repeats + 1 if target.max_positions is None else (target.max_positions - ids.shape[1]) // once
    if room < 1:
        raise ValueError(
            f"timing needs up to {ids.shape[1] + once} positions and {target.name} has {target.max_positions}: "
            "use a shorter prompt or fewer sizes"
        )
    done: list[Round] = []
    turns = repeats + 1  # the first of each size warms up
    while turns:
        now = min(turns, room)
        done += _decode(target, drafter, ids, [*budgets] * now, once * now, batch)
        turns -= now
    return done[len(budgets) :]


def _decode(
    target: Target, drafter: Drafter, ids: Tensor, budgets: Sequence[Budget], most: int, batch: int
) -> list[Round]:
    ids = ids.to(target.device)
    stop = Stop(ids.shape[1] + most)
    texts = [Decoding(target, ids, drafter.fork(), budgets[0], stop) for _ in range(batch)]
    rounds = Rounds(texts).run()
    next(rounds)
    found = []
    for budget in budgets:
        for text in texts:
            text.budget = budget
        next(rounds)
        last = [text.stats.log[-1] for text in texts]
        found.append(
            replace(
                last[0],
                seconds=sum(r.seconds for r in last),
                draft_total_seconds=sum(r.draft_total_seconds for r in last),
            )
        )
    return found


def _outside_drafts(done: Round) -> float:
    return done.seconds - done.draft_total_seconds


def _medians(sizes: Sequence[Size], rounds: Sequence[Round], seconds: Callable[[Round], float]) -> dict[Size, float]:
    return {size: statistics.median(map(seconds, rounds[at :: len(sizes)])) for at, size in enumerate(sizes)}


def _rising(seconds: dict[int, float]) -> dict[int, float]:
    return dict(zip(sorted(seconds), accumulate((seconds[n] for n in sorted(seconds)), max), strict=True))
