"""Which conversations make an optimizer step, and which process holds which of them.

The first question is answered without knowing how many processes or micro-batches there are, so a run's steps are
the same on one process and on many, with little memory and with much. All of it follows from seed and epoch, so
a run is resumed by the number of its next batch alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from data.pack import plan


def by_length(lengths: np.ndarray, budget: int) -> Iterator[list[int]]:
    """Conversation numbers in groups of like length, each at most ``budget`` padded tokens (or one conversation)."""
    group: list[int] = []
    for index in np.argsort(-lengths, kind="stable").tolist():
        if group and lengths[group[0]] * (len(group) + 1) > budget:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def plan_epoch(lengths: np.ndarray, batch_tokens: int, bucket: int, seed: int, epoch: int) -> list[list[int]]:
    """Conversation numbers of each optimizer step of an epoch; every conversation stands in exactly one.

    Conversations are shuffled, then taken in pools of about ``bucket`` steps; a pool is sorted by length and cut
    into steps of about ``batch_tokens`` tokens, which run in shuffled order. So a step's conversations are of like
    length (little padding), and no two epochs have the same steps.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    pools = (np.cumsum(lengths[order]) - 1) // (batch_tokens * bucket)
    steps: list[list[int]] = []
    for pool in np.split(order, np.flatnonzero(np.diff(pools)) + 1):
        pool = pool[np.argsort(lengths[pool], kind="stable")]
        before = np.cumsum(lengths[pool]) - lengths[pool] / 2
        number = max(1, round(float(lengths[pool].sum()) / batch_tokens))
        place = np.minimum((before * number / lengths[pool].sum()).astype(int), number - 1)
        parts = [part.tolist() for part in np.split(pool, np.flatnonzero(np.diff(place)) + 1)]
        steps += [parts[i] for i in random.permutation(len(parts))]
    return steps


@dataclass(frozen=True)
class Micro:
    """One forward pass of one process. ``counts`` is false for a filler, which keeps processes in step."""

    indices: tuple[int, ...]
    counts: bool = True


def split_step(
    indices: list[int], lengths: np.ndarray, micro_tokens: int, processes: int, *, packing: bool = False
) -> list[list[Micro]]:
    """Micro-batches of a step by process, equally many for each.

    Conversations of like length go together; at any moment the processes hold batches of like size. Where there
    are too few conversations to go round, the rest of the processes repeat one that does not count.

    Args:
        packing: rows hold several conversations, see ``train/packing.py``.
    """
    grouped = packed_groups if packing else by_length
    groups = [[indices[i] for i in group] for group in grouped(lengths[indices], micro_tokens)]
    while len(groups) % processes and max(map(len, groups)) > 1:
        largest = max(range(len(groups)), key=lambda i: (len(groups[i]), -i))
        group = groups[largest]
        groups[largest : largest + 1] = [group[: len(group) // 2], group[len(group) // 2 :]]
    micros = [Micro(tuple(group)) for group in groups]
    micros.sort(key=lambda micro: -int(lengths[list(micro.indices)].max()) * len(micro.indices))
    micros += [Micro(micros[-1].indices, counts=False)] * (-len(micros) % processes)
    return [micros[rank::processes] for rank in range(processes)]


def packed_groups(lengths: np.ndarray, budget: int) -> list[list[int]]:
    """Conversation numbers of batches whose rows, as long as the longest of all, are ``budget`` tokens (or one row)."""
    longest = int(lengths.max())
    rows = plan(lengths.tolist(), longest)
    many = max(1, budget // longest)
    return [[number for row in rows[at : at + many] for number in row] for at in range(0, len(rows), many)]
