"""How far ``stable=True`` keeps its promise on this machine, and what it costs.

Every prompt is answered without a draft and with drafts of all sorts, each with fixed-shape passes and without. Some
drafts are replays of the answer without a draft, so that long ones are accepted, short ones are, wrong ones are
rejected and trees leave holes in the cache; drafters may be added, as chains and as trees. Texts are compared with
the one without a draft.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from heads.draft import Draft
from heads.grow import Budget, Sampler
from heads.target import Target
from infer.drafters import Drafter
from infer.evaluate import Question
from infer.generate import generate
from infer.generation import Generation
from infer.progress import progress
from infer.rounding import first_difference
from infer.stable import fixed_rows

PLAIN = "no draft"
TREE_WIDTH = 8
Way = Callable[[list[int], int], tuple[Any, Budget | None]]  # prompt and answer; the prompt's place → drafter, budget


class Replay:
    """Drafts a text that is known, with faults.

    Args:
        text: prompt and answer.
        ragged: seed of drafts of random length, every fifth token wrong; None for whole right ones.
        wide: beside each token, before or behind it, a wrong one.
    """

    taps: tuple[int, ...] = ()
    lookahead = 7
    module_seconds = 0.0

    def __init__(self, text: list[int], ragged: int | None = None, wide: bool = False) -> None:
        self.text, self.ragged, self.wide = text, ragged, wide
        self._random = random.Random(ragged)
        self._at = self._vocab = 0

    def begin(self, target: Target, ids: Tensor, taps: Tensor | None) -> None:
        """The text so far is ``ids`` (1, n+1)."""
        self._at, self._vocab = ids.shape[1], target.vocab_size

    def commit(self, taps: Tensor | None, ids: list[int]) -> None:
        """Move on."""
        self._at += len(ids)

    def fork(self) -> Replay:
        """For another text."""
        return Replay(self.text, self.ragged, self.wide)

    def propose(self, budget: Budget, sampler: Sampler | None) -> Draft:
        """What comes next in the known text."""
        right = self.text[self._at : self._at + budget.depth]
        if self.ragged is not None:
            right = right[: self._random.randint(0, budget.depth)]
            right = [token if self._random.random() < 0.8 else self._other(token) for token in right]
        if not self.wide:
            return Draft.chain(right[: budget.rows - 1])
        tokens: list[int] = []
        parents: list[int] = []
        node = -1
        for token in right[: (budget.rows - 1) // 2]:
            pair = [token, self._other(token)] if self._random.random() < 0.5 else [self._other(token), token]
            tokens += pair
            parents += [node, node]
            node = len(tokens) - 2 + pair.index(token)
        return Draft(tuple(tokens), tuple(parents), (None,) * len(tokens))

    def _other(self, token: int) -> int:
        return (token + 1 + self._random.randrange(self._vocab - 1)) % self._vocab


def shapes(name: str, drafter: Drafter, rows: int) -> dict[str, tuple[Drafter, Budget]]:
    """One drafter as a chain and as a tree by confidence, each of up to ``rows`` rows a pass."""
    depth = min(drafter.lookahead, rows - 1)
    return {
        f"{name}, chain": (drafter, Budget.chain(depth)),
        f"{name}, tree": (drafter, Budget(rows=rows, depth=depth, width=TREE_WIDTH)),
    }


def ways(
    rows: int, drafters: Mapping[str, tuple[Drafter, Budget | None]] | None = None, replays: bool = True
) -> dict[str, Way]:
    """Drafts of up to ``rows`` rows a pass: replays as chains and as a tree, and these drafters."""
    chain, tree = Budget.chain(rows - 1), Budget(rows=rows, depth=rows - 1, width=2)
    found: dict[str, Way] = {
        "right chains": lambda text, place: (Replay(text), chain),
        "ragged chains": lambda text, place: (Replay(text, ragged=place), chain),
        "trees": lambda text, place: (Replay(text, wide=True), tree),
    }
    if not replays:
        found = {}
    for name, given in (drafters or {}).items():
        found[name] = lambda text, place, given=given: given  # type: ignore[misc]
    return found


def measure(
    target: Target,
    questions: Sequence[Question],
    drafters: Mapping[str, tuple[Drafter, Budget | None]] | None = None,
    *,
    rows: int | None = None,
    max_new_tokens: int = 96,
    usual: int | None = None,
    replays: bool = True,
) -> dict[str, Any]:
    """Answer every question greedily in every way, with fixed-shape passes and without.

    Args:
        drafters: to try, each with its budget (:func:`shapes` gives two).
        rows: of a fixed-shape pass; those of ``stable=True`` by default.
        usual: how many of the questions are also answered without fixed-shape passes; all by default.
        replays: try replays of the answer without a draft too.

    Returns:
        Plain values. For ``stable`` and ``usual``: by way, of how many prompts how many texts are the one without a
        draft, passes, and seconds a pass; each first difference with the gap between the two logits. ``cost``: median
        over prompts answered both ways of a stable pass over a usual pass of one row, and over one of as many rows.

    Raises:
        ValueError: no questions, or a target whose attention cannot be exchanged.
    """
    if not questions:
        raise ValueError("stability needs prompts to answer")
    wide = rows or fixed_rows(True) or 0
    arms: dict[str, bool | int] = {"usual": False, "stable": wide}
    tally: dict[str, dict[str, list[_Answer]]] = {arm: {} for arm in arms}
    both = len(questions) if usual is None else min(usual, len(questions))
    for place, question in enumerate(progress(questions, len(questions), "answering")):
        for arm, stable in arms.items():
            if arm == "usual" and place >= both:
                continue
            plain = _answer(target, question, "none", None, stable, max_new_tokens)
            tally[arm].setdefault(PLAIN, []).append(plain)
            text = question.ids[0].tolist() + plain.tokens
            for name, way in ways(wide, drafters, replays).items():
                drafter, budget = way(text, place)
                answer = _answer(target, question, drafter, budget, stable, max_new_tokens)
                tally[arm].setdefault(name, []).append(answer)
    report: dict[str, Any] = {"target": target.name, "dtype": str(target.dtype).removeprefix("torch."), "rows": wide}
    report |= {"prompts": len(questions), "max_new_tokens": max_new_tokens}
    for arm, by_way in tally.items():
        report[arm] = {name: _compared(target, questions, by_way[PLAIN], found) for name, found in by_way.items()}
    pairs = {"usual pass of one row": PLAIN, "usual pass of as many rows": "right chains"}
    report["cost"] = {
        against: _ratio(tally["stable"][name], tally["usual"][name])
        for against, name in pairs.items()
        if name in tally["usual"]
    }
    return report


class _Answer:
    """New tokens, and seconds of each pass after the prefill."""

    def __init__(self, out: Generation, prompt: int) -> None:
        self.tokens: list[int] = out.sequences[0, prompt:].tolist()
        self.passes = [done.target_seconds for done in out.stats.log]


@torch.inference_mode()
def _answer(
    target: Target, question: Question, drafter: Any, budget: Budget | None, stable: bool | int, new: int
) -> _Answer:
    settings: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "stable": stable}
    return _Answer(generate(target, question.ids, drafter, budget=budget, **settings), question.ids.shape[1])


def _compared(
    target: Target, questions: Sequence[Question], plain: Sequence[_Answer], found: Sequence[_Answer]
) -> dict[str, Any]:
    differences = []
    for question, own, other in zip(questions, plain, found, strict=False):  # not all are answered in the usual way
        parted = first_difference(target, question.ids, other.tokens, own.tokens)
        if parted is not None:
            differences.append({"prompt": question.id} | parted.to_dict())
    passes = [seconds for answer in found for seconds in answer.passes]
    return {
        "prompts": len(found),
        "same": len(found) - len(differences),
        "passes": len(passes),
        "seconds_per_pass": statistics.median(passes) if passes else None,
        "differences": differences,
    }


def _ratio(ours: Sequence[_Answer], theirs: Sequence[_Answer]) -> float | None:
    """Median over prompts of the median pass against the median pass."""
    both = [(a.passes, b.passes) for a, b in zip(ours, theirs, strict=False) if a.passes and b.passes]
    return statistics.median(statistics.median(a) / statistics.median(b) for a, b in both) if both else None


def table(report: Mapping[str, Any]) -> str:
    """The report for people."""
    lines = [f"{report['target']} in {report['dtype']}: texts equal to the one without a draft"]
    arms = [arm for arm in ("usual", "stable") if report[arm]]
    heads = {"usual": "as usual", "stable": f"stable={report['rows']}"}
    lines.append(f"{'':<16}" + "".join(f"{heads[arm]:>12}{'ms a pass':>11}" for arm in arms))
    for name in report["stable"]:
        line = f"{name:<16}"
        for arm in arms:
            cell = report[arm][name]
            time = "" if cell["seconds_per_pass"] is None else f"{1e3 * cell['seconds_per_pass']:.1f}"
            same = f"{cell['same']}/{cell['prompts']}"
            line += f"{same:>12}{time:>11}"
        lines.append(line)
    for arm in ("usual", "stable"):
        gaps = [part["gap"] for cell in report[arm].values() for part in cell["differences"] if part["gap"] is not None]
        if gaps:
            lines.append(f"{arm}: texts part where two logits are {min(gaps):.3g} to {max(gaps):.3g} apart")
    for against, ratio in report["cost"].items():
        if ratio is not None:
            lines.append(f"a stable pass takes {ratio:.2f} times as long as a {against}")
    return "\n".join(lines)
