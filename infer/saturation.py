"""Batch × look-ahead: tokens a second for every pair, and the batch from which drafting stops paying.

A pass over one text leaves most of a machine idle, and drafted rows fill it for nothing; texts decoded together fill it
too, until a drafted row takes time from another text's own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch

from heads.grow import Budget
from heads.target import Target
from infer.costs import settings, where
from infer.decode import Decoding
from infer.drafters import Drafter
from infer.evaluate import Question
from infer.progress import progress
from infer.rounds import Rounds
from infer.stopping import Stop


@dataclass(frozen=True)
class Cell:
    """One measurement: tokens and rounds of all texts, and the seconds they took."""

    tokens: int
    rounds: int
    seconds: float


def saturation(
    target: Target,
    drafter: Drafter,
    questions: Sequence[Question],
    batches: Sequence[int],
    depths: Sequence[int],
    *,
    max_new_tokens: int = 48,
    repeats: int = 3,
) -> dict[str, Any]:
    """Decode greedily ``batch`` texts together with chains of each depth, all pairs in turn, ``repeats`` times.

    Each time begins at other prompts, the same for all pairs of a batch.

    Only rounds in which all texts are alive count, so that a batch stays what it is called.

    Args:
        target: what decodes.
        drafter: what drafts; each text has a fork of its own.
        questions: prompts, used again in turn where there are too few.
        batches: texts decoded together.
        depths: tokens of a chain; 0, plain decoding, is always among them.
        max_new_tokens: length of answers, without regard to an end of sequence.
        repeats: of the whole table; the median of each cell counts.

    Returns:
        A report of plain values: ``rates`` (batch -> depth -> tokens a second), ``tokens_per_round``, ``best``
        (batch -> depth), and ``stops_paying_at``, the smallest batch from which on plain decoding is fastest, or None.

    Raises:
        ValueError: no prompts, or a batch below 1.
    """
    if not questions or min(batches, default=0) < 1 or min(depths, default=0) < 0:
        raise ValueError("a table of batch × depth needs prompts, batches of 1 or more and depths of 0 or more")
    depths = sorted({0, *depths})
    pairs = [(batch, depth) for batch in sorted(set(batches)) for depth in depths]
    found: dict[tuple[int, int], list[Cell]] = {pair: [] for pair in pairs}
    _cell(target, drafter, questions, pairs[0], max_new_tokens)  # warms up
    for pair in progress(pairs * repeats, len(pairs) * repeats, "timing batch × depth"):
        begin = len(found[pair]) * pair[0] % len(questions)
        some = list(islice(cycle(questions), begin, begin + pair[0]))
        found[pair].append(_cell(target, drafter, some, pair, max_new_tokens))
    rates = {pair: statistics.median(cell.tokens / cell.seconds for cell in cells) for pair, cells in found.items()}
    best = {batch: max(depths, key=lambda depth: rates[batch, depth]) for batch, _ in pairs}
    return {
        "target": target.name,
        "settings": {"max_new_tokens": max_new_tokens, "repeats": repeats, **settings(target)},
        "rates": {str(b): {str(d): rates[b, d] for d in depths} for b in best},
        "tokens_per_round": {
            str(b): {
                str(d): sum(c.tokens for c in found[b, d]) / sum(c.rounds * b for c in found[b, d]) for d in depths
            }
            for b in best
        },
        "best": {str(batch): depth for batch, depth in best.items()},
        "stops_paying_at": _turn(best),
    }


def _turn(best: Mapping[int, int]) -> int | None:
    """The smallest batch from which on no draft is best."""
    turn = None
    for batch in sorted(best, reverse=True):
        if best[batch] > 0:
            break
        turn = batch
    return turn


@torch.inference_mode()
def _cell(
    target: Target, drafter: Drafter, questions: Sequence[Question], pair: tuple[int, int], max_new_tokens: int
) -> Cell:
    batch, depth = pair
    texts = []
    for question in questions[:batch]:
        ids = question.ids.to(target.device)
        stop = Stop(ids.shape[1] + max_new_tokens)
        texts.append(Decoding(target, ids, drafter.fork(), Budget.chain(depth), stop))
    rounds = Rounds(texts).run()
    next(rounds)
    tokens = count = 0
    started = time.perf_counter()
    seconds = 0.0
    for emitted in rounds:
        tokens, count = tokens + sum(map(len, emitted)), count + 1
        seconds = time.perf_counter() - started
        if any(text.done for text in texts):
            break
    return Cell(tokens, count, seconds)


def table(report: Mapping[str, Any]) -> str:
    """The report for people."""
    depths = list(next(iter(report["rates"].values())))
    lines = [
        f"{where(report)}, greedy chains, median of {report['settings']['repeats']}",
        "",
        f"{'tokens a second':<18}" + "".join(f"{'K = ' + depth:>10}" for depth in depths) + f"{'best':>10}",
    ]
    for batch, rates in report["rates"].items():
        best = report["best"][batch]
        gain = rates[str(best)] / rates["0"]
        figures = "".join(f"{rates[depth]:>10.1f}" for depth in depths)
        lines.append(f"{'batch ' + batch:<18}{figures}{f'{best} (×{gain:.2f})':>10}")
        taus = report["tokens_per_round"][batch]
        lines.append(f"{'  tokens a round':<18}" + "".join(f"{taus[depth]:>10.2f}" for depth in depths))
    turn = report["stops_paying_at"]
    lines += [
        "",
        f"drafting pays up to the largest batch measured, {list(report['rates'])[-1]}"
        if turn is None
        else f"drafting stops paying at batch {turn}",
    ]
    return "\n".join(lines)
