"""What a decode did, and figures drawn from it. Counts are kept and summed; ratios are formed last.

Conventions: a round is one draft and one verification pass. Tokens per round (τ) counts the tokens that rounds
emitted, bonus included and the prefill's token left out, over rounds; a last round cut short by a stop counts as it
was. Acceptance is accepted over proposed; by position it is joint (this and all earlier ones accepted, over all
rounds) unless called conditional.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

NGRAM = 8


@dataclass
class Round:
    """One draft and its verification.

    Attributes:
        proposed: drafted nodes.
        depth: length of the draft's longest path.
        accepted: drafted tokens emitted.
        emitted: all tokens emitted, the target's own included; fewer where a stop cut the round.
        rows: of the target's pass for this text: root, nodes, and what a drafter added to them; 0 where not counted.
        looped: every token of the round lies inside an 8-gram that stood earlier in the same output.
        seconds: the whole round.
        target_seconds: the target's pass.
        draft_seconds: inside the drafter's nn.Module forwards.
        draft_total_seconds: all of drafting, keeping the drafter's state included.
    """

    proposed: int
    depth: int
    accepted: int
    emitted: int
    rows: int = 0
    looped: bool = False
    seconds: float = 0.0
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    draft_total_seconds: float = 0.0


@dataclass
class Stats:
    """Figures of one output.

    Attributes:
        tokens: new tokens, the prefill's included.
        prefill_seconds: from the prompt to the first token.
        reused: tokens of the prompt that a prefix cache knew and that were not read again.
        log: the rounds after it.
    """

    tokens: int = 0
    prefill_seconds: float = 0.0
    reused: int = 0
    log: list[Round] = field(default_factory=list)

    @classmethod
    def pooled(cls, each: Iterable[Stats]) -> Stats:
        """All of several outputs together; times of texts decoded together are shares, so sums are wall-clock."""
        total = cls()
        for stats in each:
            total.tokens += stats.tokens
            total.prefill_seconds += stats.prefill_seconds
            total.reused += stats.reused
            total.log += stats.log
        return total

    @property
    def rounds(self) -> int:
        """Verification passes, the prefill not counted."""
        return len(self.log)

    @property
    def proposed(self) -> int:
        """Drafted tokens."""
        return sum(r.proposed for r in self.log)

    @property
    def accepted(self) -> int:
        """Drafted tokens that were emitted."""
        return sum(r.accepted for r in self.log)

    @property
    def acceptance_rate(self) -> float:
        """Accepted over proposed; 0 when nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def accepted_per_position(self) -> list[float]:
        """Joint: fraction of rounds that accepted at least k drafted tokens, k = 1 … the deepest draft."""
        return joint_acceptance(self.log)

    @property
    def tokens_per_round(self) -> float:
        """τ; 0 without a round."""
        return tokens_per_round(self.log)

    @property
    def decode_seconds(self) -> float:
        """All rounds together; time the caller took between them is not in it."""
        return sum(r.seconds for r in self.log)

    @property
    def forward_share(self) -> float:
        """(Target's passes + drafter's nn.Module forwards) / decode time: 1 would be a loop that costs nothing."""
        inside = sum(r.target_seconds + r.draft_seconds for r in self.log)
        return inside / self.decode_seconds if self.decode_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain figures for JSON, without the log."""
        names = (
            "tokens",
            "rounds",
            "proposed",
            "accepted",
            "acceptance_rate",
            "accepted_per_position",
            "tokens_per_round",
            "prefill_seconds",
            "decode_seconds",
            "forward_share",
        )
        return {name: getattr(self, name) for name in names}


class Interval(NamedTuple):
    """A pooled figure and its 95% bootstrap interval over prompts."""

    value: float
    low: float
    high: float


def tokens_per_round(log: Sequence[Round]) -> float:
    """Tokens emitted by rounds over rounds; 0 for none."""
    return sum(r.emitted for r in log) / len(log) if log else 0.0


def joint_acceptance(log: Sequence[Round]) -> list[float]:
    """Fraction of all rounds that accepted position k and all before it; their sum is the mean accepted length."""
    deepest = max((r.depth for r in log), default=0)
    return [sum(r.accepted >= k for r in log) / len(log) for k in range(1, deepest + 1)]


def conditional_acceptance(log: Sequence[Round]) -> list[float]:
    """Of the rounds that drafted position k and accepted all before it, the fraction that accepted k."""
    figures = []
    for k in range(1, max((r.depth for r in log), default=0) + 1):
        reached = [r for r in log if r.depth >= k and r.accepted >= k - 1]
        figures.append(sum(r.accepted >= k for r in reached) / len(reached) if reached else 0.0)
    return figures


def loop_free(stats: Stats | Iterable[Stats]) -> list[Round]:
    """The rounds, of one output or pooled over several, that were not inside a loop of the text."""
    each = [stats] if isinstance(stats, Stats) else stats
    return [r for s in each for r in s.log if not r.looped]


def in_loop(tokens: Sequence[int], n: int = NGRAM) -> list[bool]:
    """For each token of an output, whether it lies inside an n-gram that stood earlier in that output."""
    seen: set[tuple[int, ...]] = set()
    inside = [False] * len(tokens)
    for end in range(n, len(tokens) + 1):
        gram = tuple(tokens[end - n : end])
        if gram in seen:
            inside[end - n : end] = [True] * n
        seen.add(gram)
    return inside


def mark_loops(log: Sequence[Round], output: Sequence[int]) -> None:
    """Set ``looped`` of every round, given the whole new text (its first token is the prefill's)."""
    inside = in_loop(output)
    at = 1
    for r in log:
        r.looped = all(inside[at : at + r.emitted])
        at += r.emitted


def pooled(stats: Sequence[Stats], *, without_loops: bool = False, resamples: int = 1000, seed: int = 0) -> Interval:
    """τ over several prompts, sum over sum, with a 95% bootstrap interval over prompts.

    Args:
        stats: one a prompt.
        without_loops: only rounds outside loops.
        resamples: bootstrap samples of the prompts.
        seed: of the resampling, so that a report repeats.
    """
    logs = [loop_free(s) if without_loops else s.log for s in stats]
    counts = torch.tensor([[sum(r.emitted for r in log), len(log)] for log in logs], dtype=torch.float64).view(-1, 2)
    emitted, rounds = counts.sum(0).tolist()
    if not rounds:
        return Interval(0.0, 0.0, 0.0)
    draws = torch.randint(len(logs), (resamples, len(logs)), generator=torch.Generator().manual_seed(seed))
    sums = counts[draws].sum(1)
    ratios = (sums[:, 0] / sums[:, 1])[sums[:, 1] > 0]
    low, high = ratios.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(emitted / rounds, low, high)
