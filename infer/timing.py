"""One answer on the clock: when each token reached a streamer, the same way for every decoder."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from heads.grow import Budget
from heads.target import Target
from infer.control import Control
from infer.drafters import Drafter
from infer.evaluate import Question
from infer.generate import generate
from infer.metrics import Stats, in_loop


class Clock:
    """A streamer that notes when each new token arrives."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.arrivals: list[float] = []
        self.sizes: list[int] = []  # tokens that came together
        self._prompt = True

    def put(self, value: Tensor) -> None:
        """The prompt first, then tokens."""
        if self._prompt:
            self._prompt = False
        else:
            self.arrivals += [time.perf_counter()] * value.numel()
            self.sizes.append(value.numel())

    def end(self) -> None:
        """Nothing follows."""


@dataclass
class Run:
    """One arm's answer to one prompt.

    Attributes:
        tokens: new tokens.
        groups: how many arrived together: the prefill's token, then each round's. (transformers' assisted decoding
            has no prefill apart: its first group is the first round's.)
        ttft: seconds to the first token.
        waits: seconds before each group but the first.
        stats: the loop's own account; None for ``model.generate``.
    """

    tokens: list[int]
    groups: list[int]
    ttft: float
    waits: list[float]
    stats: Stats | None = None

    @classmethod
    def of(cls, clock: Clock, tokens: list[int], groups: list[int], stats: Stats | None = None) -> Run:
        """From the clock that watched it."""
        ends: list[float] = []
        at = 0
        for size in groups:
            at += size
            ends.append(clock.arrivals[at - 1])
        waits = [b - a for a, b in pairwise(ends)]
        return cls(tokens, groups, clock.arrivals[0] - clock.started, waits, stats)

    @property
    def free(self) -> list[bool]:
        """For each group after the first, whether it lies outside loops of the text."""
        inside = in_loop(self.tokens)
        flags, at = [], self.groups[0] if self.groups else 0
        for size in self.groups[1:]:
            flags.append(not all(inside[at : at + size]))
            at += size
        return flags

    def work(self, without_loops: bool = False) -> tuple[int, float]:
        """Tokens decoded after the first, and the seconds they took."""
        kept = [
            (size, wait)
            for size, wait, free in zip(self.groups[1:], self.waits, self.free, strict=True)
            if free or not without_loops
        ]
        return sum(size for size, _ in kept), sum(wait for _, wait in kept)

    def per_token(self) -> list[float]:
        """Seconds for each token after the first; tokens that arrive together share their wait."""
        return [wait / size for size, wait in zip(self.groups[1:], self.waits, strict=True) for _ in range(size)]


def sampling(temperature: float, top_p: float = 1.0) -> dict[str, Any]:
    """Settings of ``generate``: greedy at 0, else sampled from the likeliest tokens that make up ``top_p``."""
    if not temperature:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": top_p}


def bare(
    target: Target,
    question: Question,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    top_p: float = 1.0,
    **drafting: Any,
) -> Run:
    """The answer of ``model.generate`` and nothing else, or with its own ``drafting``."""
    ids = question.ids.to(target.device)
    torch.manual_seed(seed)
    clock = Clock()
    out = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        num_beams=1,
        streamer=clock,
        **sampling(temperature, top_p),
        **drafting,
    )
    return Run.of(clock, out[0, ids.shape[1] :].tolist(), clock.sizes)


def loop(
    target: Target,
    drafter: Drafter,
    question: Question,
    budget: Budget | None,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    control: Control | str = "fixed",
    top_p: float = 1.0,
) -> Run:
    """The answer of this project's loop."""
    clock = Clock()
    out = generate(
        target,
        question.ids,
        draft=drafter,
        budget=budget,
        control=control,
        seed=seed if temperature else None,
        stream=clock,
        max_new_tokens=max_new_tokens,
        **sampling(temperature, top_p),
    )
    tokens = out.sequences[0, question.ids.shape[1] :].tolist()
    return Run.of(clock, tokens, [1, *(r.emitted for r in out.stats.log)], out.stats)


def tokens_per_round(runs: Sequence[Run], without_loops: bool = False) -> float:
    """τ, sum over sum, from what arrived together after the first group; 0 without a round."""
    kept = [
        size for run in runs for size, free in zip(run.groups[1:], run.free, strict=True) if free or not without_loops
    ]
    return sum(kept) / len(kept) if kept else 0.0


def percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest-rank percentile of sorted values; 0 for none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def speed(runs: Sequence[Run], without_loops: bool = False) -> float:
    """Tokens a second after the first token, sum over sum; 0 where nothing was decoded."""
    tokens, seconds = map(sum, zip(*(run.work(without_loops) for run in runs), strict=True))
    return tokens / seconds if seconds else 0.0


def pooled_ratio(baseline: Sequence[Run], heads: Sequence[Run], without_loops: bool) -> float:
    """Ratio of pooled speeds; 0 where one side decoded nothing."""
    base = speed(baseline, without_loops)
    return speed(heads, without_loops) / base if base else 0.0


def median_ratio(baseline: Sequence[Run], heads: Sequence[Run], without_loops: bool) -> float:
    """Median over prompts of the ratio of speeds; prompts answered in one token, or only in loops, say nothing."""
    ratios = [
        own / base
        for theirs, ours in zip(baseline, heads, strict=True)
        if (base := speed([theirs], without_loops)) and (own := speed([ours], without_loops))
    ]
    return statistics.median(ratios) if ratios else 0.0
