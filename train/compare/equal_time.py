"""Every arm once more, for as long as is given: states of the target, start and steps together take that time.

A trainer that computes states beforehand pays for them here, one that computes them in each step has longer steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from train.compare.arms import Course, Taught, taught
from train.compare.rates import Try


def named(arm: str, seconds: float) -> str:
    """What an arm is called that was trained for so long."""
    return f"{arm}, {seconds:g} s"


def steps_in(name: str, done: Taught, seconds: float) -> int:
    """Optimizer steps that fit, by what an arm took before.

    Raises:
        ValueError: states and start alone take longer, or it is not known what they took.
    """
    assert done.steps is not None
    if done.states is None or done.seconds is None:
        what = "its states took, which something else made" if done.states is None else "it took, since it was killed"
        raise ValueError(f"--seconds: it is not known how long {what}: {name} needs a --runs folder of its own")
    left, each = seconds - done.states - done.fixed, (done.seconds - done.fixed) / done.steps
    if left < each:
        raise ValueError(
            f"--seconds {seconds:g}: {name} needs {done.states + done.fixed:.0f} s for states and start, and "
            f"{each:.1f} s a step: give more time"
        )
    return int(left / each)


def longer(best: Mapping[str, Try], course: Course, seconds: float | None) -> dict[str, Taught]:
    """Heads by the arms' new names, at the rate that was best for each; arms that were not trained are left out.

    Raises:
        ValueError: see :func:`steps_in`; said before any is trained.
    """
    if seconds is None:
        return {}
    trained = {name: one for name, one in best.items() if one.done.steps is not None}
    steps = {name: steps_in(name, one.done, seconds) for name, one in trained.items()}
    arms = {name: replace(one.arm, name=named(name, seconds)) for name, one in trained.items()}
    return {arms[name].name: taught(arms[name], replace(course, steps=steps[name])) for name in trained}
