"""What a serving engine did with exported heads, held against the engine's own base and against our own engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infer.metrics import Stats, joint_acceptance

CLOSE = 0.03  # acceptance at each position may differ by so much
ROUNDS = 2000  # over at least so many rounds of each engine


@dataclass(frozen=True)
class Ours:
    """Our own engine with some heads: rounds that were not cut short by a text's end, and joint acceptance in them."""

    rounds: int
    accepted: list[float]

    @classmethod
    def of(cls, stats: Sequence[Stats], lookahead: int) -> Ours:
        """The last round of a text is left out, which its end may have cut; the engine counts its own whole."""
        log = [r for each in stats for r in each.log[:-1] if r.depth == lookahead]
        return cls(len(log), joint_acceptance(log))


def compare(
    base: Mapping[str, Any], served: Mapping[str, Any], ours: Ours, *, close: float = CLOSE, rounds: int = ROUNDS
) -> dict[str, Any]:
    """One served export beside the engine's base and beside our engine.

    Args:
        base, served: results of :mod:`tests.serving.engine`, without and with a draft, of the same prompts.
        ours: the same heads, prompts and look-ahead.
        close, rounds: what has to hold.

    Raises:
        ValueError: the engine drafted nothing, or the two answered different prompts.
    """
    if not served["rounds"]:
        raise ValueError("the engine drafted nothing: the heads were not used")
    if len(base["tokens"]) != len(served["tokens"]):
        raise ValueError(f"{len(served['tokens'])} answers where the base has {len(base['tokens'])}")
    accepted = [count / served["rounds"] for count in served["accepted"]]
    different = [i for i, (a, b) in enumerate(zip(base["tokens"], served["tokens"], strict=True)) if a != b]
    apart = [abs(a - b) for a, b in zip(accepted, ours.accepted, strict=True)]
    enough = min(served["rounds"], ours.rounds) >= rounds
    return {
        "ok": not different and max(apart) <= close and enough,
        "texts": len(base["tokens"]),
        "different": different,
        "rounds": served["rounds"],
        "accepted": accepted,
        "our_rounds": ours.rounds,
        "our_accepted": ours.accepted,
        "apart": max(apart),
        "enough_rounds": enough,
    }


def table(report: Mapping[str, Any]) -> str:
    """The report for people, ``exports`` being name → what :func:`compare` found."""
    lines = [
        f"vLLM {report['vllm']} on {report['machine']}, {report['dtype']}, {report['prompts']} held-out prompts, "
        f"{report['max_new_tokens']} new tokens, greedy",
        f"target {report['target']}; acceptance: rounds that accepted so many drafted tokens or more",
        "",
        f"{'export':<14}{'K':>3}{'texts = base':>14}{'rounds':>9}  {'accepted in vLLM':<26}"
        f"{'ours, rounds':>13}  {'accepted in Headstart':<26}{'apart':>7}",
    ]
    for name, found in report["exports"].items():
        same = f"{found['texts'] - len(found['different'])}/{found['texts']}"
        lines.append(
            f"{name:<14}{len(found['accepted']):>3}{same:>14}{found['rounds']:>9.0f}  "
            f"{_figures(found['accepted']):<26}{found['our_rounds']:>13}  {_figures(found['our_accepted']):<26}"
            f"{found['apart']:>7.3f}{'' if found['ok'] else '  FAILED'}"
        )
    lines.append("")
    rounds = "" if report["full"] else f" (fewer than {ROUNDS} rounds: a trial, not the check)"
    lines.append(f"{'as it must be' if report['ok'] else 'NOT AS IT MUST BE'}{rounds}")
    return "\n".join(lines)


def _figures(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)
