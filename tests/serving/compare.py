"""What a serving engine did with exported heads, held against the engine's own base and against our own engine.

Both engines' rounds are counted alike, from how many tokens each of them emitted: a round is counted when nothing could
have cut it short, neither the length that was asked for nor the text's end. So equal drafts give equal figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CLOSE = 0.03  # acceptance at each position may differ by so much
ROUNDS = 2000  # over at least so many rounds of each engine


@dataclass(frozen=True)
class Run:
    """Texts of one engine.

    Attributes:
        tokens: the new tokens of each text.
        steps: how many of them came at once: the prefill's one, then each round's.
        lookahead: drafted tokens a round, K.
        longest: new tokens that were asked for.
    """

    tokens: Sequence[Sequence[int]]
    steps: Sequence[Sequence[int]]
    lookahead: int
    longest: int

    @classmethod
    def of(cls, found: Mapping[str, Any], lookahead: int, longest: int) -> Run:
        """From what :mod:`tests.serving.engine` found."""
        return cls(found["tokens"], found["steps"], lookahead, longest)

    def whole(self) -> Iterator[tuple[int, int, int]]:
        """Text, tokens before it and accepted drafts of each round that nothing could have cut short."""
        for text, (tokens, steps) in enumerate(zip(self.tokens, self.steps, strict=True)):
            ended = len(tokens) < self.longest
            at = steps[0]
            for number, emitted in enumerate(steps[1:], 2):
                if at + self.lookahead + 1 <= self.longest and not (ended and number == len(steps)):
                    yield text, at, emitted - 1
                at += emitted

    def acceptance(self) -> tuple[int, list[float]]:
        """Rounds, and the share of them that accepted position k and all before it, k = 1 … K."""
        accepted = [count for _, _, count in self.whole()]
        of = max(len(accepted), 1)
        return len(accepted), [sum(a >= k for a in accepted) / of for k in range(1, self.lookahead + 1)]


def alike(one: Run, other: Run) -> tuple[int, int]:
    """Rounds that both began at the same place behind the same text, and how many of them accepted as many tokens."""
    theirs = {(text, at): count for text, at, count in other.whole()}
    both = [
        (count, theirs[text, at])
        for text, at, count in one.whole()
        if (text, at) in theirs and list(one.tokens[text][:at]) == list(other.tokens[text][:at])
    ]
    return len(both), sum(a == b for a, b in both)


def compare(
    base: Mapping[str, Any],
    served: Mapping[str, Any],
    ours: Run,
    *,
    close: float = CLOSE,
    rounds: int = ROUNDS,
) -> dict[str, Any]:
    """One served export beside the engine's base and beside our engine.

    Args:
        base, served: results of :mod:`tests.serving.engine`, without and with a draft, of the same prompts.
        ours: the same heads, prompts and look-ahead.
        close, rounds: what has to hold.

    Raises:
        ValueError: the engine drafted nothing, the two answered different prompts, or the rounds that were seen are not
            those that the engine counted.
    """
    if not served["drafts"]:
        raise ValueError("the engine drafted nothing: the heads were not used")
    if len(base["tokens"]) != len(served["tokens"]):
        raise ValueError(f"{len(served['tokens'])} answers where the base has {len(base['tokens'])}")
    seen = sum(len(steps) - 1 for steps in served["steps"])
    if seen != served["drafts"]:
        raise ValueError(f"the engine counted {served['drafts']:.0f} drafts where its texts came in {seen} rounds")
    theirs = Run.of(served, ours.lookahead, ours.longest)
    (count, accepted), (our_count, our_accepted) = theirs.acceptance(), ours.acceptance()
    different = [i for i, (a, b) in enumerate(zip(base["tokens"], served["tokens"], strict=True)) if a != b]
    apart = [abs(a - b) for a, b in zip(accepted, our_accepted, strict=True)]
    same_place, same_accepted = alike(theirs, ours)
    enough = min(count, our_count) >= rounds
    return {
        "ok": not different and max(apart) <= close and enough,
        "texts": len(base["tokens"]),
        "different": different,
        "rounds": count,
        "accepted": accepted,
        "our_rounds": our_count,
        "our_accepted": our_accepted,
        "apart": max(apart),
        "enough_rounds": enough,
        "same_place": same_place,
        "same_accepted": same_accepted,
        "our_texts_different": [
            i for i, (a, b) in enumerate(zip(base["tokens"], ours.tokens, strict=True)) if list(a) != list(b)
        ],
        "counted_by_engine": {"rounds": served["drafts"], "accepted": served["accepted"]},
    }


def table(report: Mapping[str, Any]) -> str:
    """The report for people, ``exports`` being name → what :func:`compare` found."""
    lines = [
        f"vLLM {report['vllm']} on {report['machine']}, {report['dtype']}, {report['prompts']} held-out prompts, "
        f"{report['max_new_tokens']} new tokens, greedy",
        f"target {report['target']}; acceptance: share of rounds that accepted so many drafted tokens or more",
        "",
        f"{'export':<13}{'K':>2}{'texts = base':>14}{'rounds':>8}  {'accepted in vLLM':<24}"
        f"{'rounds':>7}  {'accepted in Headstart':<24}{'apart':>6}{'alike':>12}",
    ]
    for name, found in report["exports"].items():
        same = f"{found['texts'] - len(found['different'])}/{found['texts']}"
        pairs = f"{found['same_accepted']}/{found['same_place']}"
        lines.append(
            f"{name:<13}{len(found['accepted']):>2}{same:>14}{found['rounds']:>8}  "
            f"{_figures(found['accepted']):<24}{found['our_rounds']:>7}  {_figures(found['our_accepted']):<24}"
            f"{found['apart']:>6.3f}{pairs:>12}{'' if found['ok'] else '  FAILED'}"
        )
    rounds = "" if report["full"] else f" (fewer than {ROUNDS} rounds: a trial, not the check)"
    lines += [
        "",
        "alike: of the rounds that both engines began at the same place, those that accepted as many tokens",
        f"{'as it must be' if report['ok'] else 'NOT AS IT MUST BE'}{rounds}",
    ]
    return "\n".join(lines)


def _figures(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)
