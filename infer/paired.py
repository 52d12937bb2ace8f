"""Two ways to draft over the same prompts: how many times as many tokens one has accepted, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from infer.metrics import Interval, Stats, loop_free


def times(
    ours: Sequence[Stats],
    theirs: Sequence[Stats],
    *,
    without_loops: bool = True,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """(τ - 1) of ours over (τ - 1) of theirs, pooled over prompts, with its 95% bootstrap interval.

    Prompts are drawn as pairs: what is hard for both does not widen the interval.

    Args:
        ours, theirs: one a prompt, in the same order.
        without_loops: leave rounds inside loops of the text out.

    Returns:
        NaN throughout where a side has no round; infinite where theirs has nothing accepted.

    Raises:
        ValueError: not the same number of prompts, or none.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"{len(ours)} and {len(theirs)} prompts are no pairs")
    counts = torch.stack([_counts(ours, without_loops), _counts(theirs, without_loops)])  # (2, prompts, 2)
    value = float(_ratio(counts.sum(1)[:, None])[0])
    draws = torch.randint(len(ours), (resamples, len(ours)), generator=torch.Generator().manual_seed(seed))
    ratios = _ratio(counts[:, draws].sum(2))
    ratios = ratios[~ratios.isnan()]
    if math.isnan(value) or not len(ratios):
        return Interval(math.nan, math.nan, math.nan)
    ordered = ratios.sort().values  # quantiles by rank, since some may be infinite
    low, high = (float(ordered[round(share * (len(ordered) - 1))]) for share in (0.025, 0.975))
    return Interval(value, low, high)


def _counts(stats: Sequence[Stats], without_loops: bool) -> Tensor:
    """(prompts, 2) drafted tokens emitted, and rounds."""
    logs = [loop_free(one) if without_loops else one.log for one in stats]
    return torch.tensor([[sum(r.emitted - 1 for r in log), len(log)] for log in logs], dtype=torch.float64)


def _ratio(counts: Tensor) -> Tensor:
    """(n,) of counts (2, n, 2)."""
    (ours, our_rounds), (theirs, their_rounds) = (side.unbind(-1) for side in counts)
    return (ours / our_rounds) / (theirs / their_rounds)
