"""The learning rate of each arm: the same few are tried for all, ours and peers', and each takes its best.

What is best is told by prompts that no other figure stands on: by how many drafts are accepted a round in walks along
greedy texts, a chain and a tree. So no trainer is judged by a rate that suits another, and none picks by luck.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from train.compare.arms import Arm, Course, Taught, taught

SETTING = {"recipe": "train.lr", "peer": "lr"}  # source → how an arm of it says its rate


@dataclass(frozen=True)
class Try:
    """An arm at a rate; ``worth`` are its accepted drafts a round, None where nothing was to choose."""

    arm: Arm
    done: Taught
    rate: float | None = None
    worth: float | None = None


def tries(arm: Arm, rates: Sequence[float]) -> list[tuple[Arm, float | None]]:
    """The arm at each rate; as it is where it names its own or is not trained here."""
    setting = SETTING.get(arm.source)
    if not rates or setting is None or setting in arm.settings:
        return [(arm, None)]
    return [
        (replace(arm, name=f"{arm.name} {rate:g}", settings={**arm.settings, setting: f"{rate:g}"}), rate)
        for rate in rates
    ]


def train_all(arms: Sequence[Arm], rates: Sequence[float], course: Course) -> dict[str, list[Try]]:
    """Every arm at every rate, by the arm's name.

    Raises:
        ValueError: they did not see equally many tokens; and see :func:`train.compare.arms.taught`.
    """
    found = {arm.name: [Try(one, taught(one, course), rate) for one, rate in tries(arm, rates)] for arm in arms}
    seen = {one.arm.name: one.done.tokens for each in found.values() for one in each}
    if len({tokens for tokens in seen.values() if tokens is not None}) > 1:
        told = ", ".join(f"{name} {tokens}" for name, tokens in seen.items())
        raise ValueError(f"the arms did not see equally many tokens: {told}")
    return found


def choose(found: dict[str, list[Try]], worth: Callable[[Try], float]) -> tuple[dict[str, Try], dict[str, list[Try]]]:
    """The best of each, under the arm's own name, and all with what they are worth."""
    told = {
        name: [replace(one, worth=worth(one)) for one in each] if len(each) > 1 else each
        for name, each in found.items()
    }
    best = {name: max(each, key=lambda one: one.worth or 0.0) for name, each in told.items()}
    return {name: replace(one, arm=replace(one.arm, name=name)) for name, one in best.items()}, told
