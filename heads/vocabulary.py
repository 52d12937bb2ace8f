"""The reduced draft vocabulary: the tokens worth being able to draft, chosen by what the target says.

What is left out can never be drafted: where the target says it, a draft ends. So :func:`coverage` is the most that
acceptance can reach, and what is missing from 1 is what a smaller and faster output matrix costs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def by_frequency(counts: Tensor, size: int) -> Tensor:
    """The ``size`` most frequent tokens, as sorted target ids.

    Args:
        counts: (V,) how often the target says each token.
        size: tokens to keep; ties go to the lower id.

    Raises:
        ValueError: more are asked for than there are.
    """
    if not 0 < size <= counts.shape[0]:
        raise ValueError(f"a draft vocabulary of {size} cannot be chosen from {counts.shape[0]} tokens")
    order = counts.sort(descending=True, stable=True).indices
    return order[:size].sort().values


def size_for(counts: Tensor, share: float) -> int:
    """How many of the most frequent tokens cover ``share`` of all that is said.

    Args:
        counts: (V,) how often the target says each token.
        share: above 0, at most 1; 1 takes every token that was said at all.

    Raises:
        ValueError: the share is none, or nothing was said.
    """
    if not 0 < share <= 1:
        raise ValueError(f"a draft vocabulary covers a share above 0 and at most 1 of what is said, not {share}")
    reached = counts.sort(descending=True).values.double().cumsum(0)
    if not float(reached[-1]):
        raise ValueError("a draft vocabulary cannot be chosen by coverage where nothing was said")
    wanted = share * float(reached[-1]) * (1 - 1e-12)  # a share of 0.95 written in binary is a little off
    return 1 + int((reached < wanted).sum())


def coverage(counts: Tensor, ids: Tensor) -> float:
    """Share of the counted tokens that can be drafted, 0 to 1."""
    total = int(counts.sum())
    return float(counts[ids].sum()) / total if total else 0.0


def check_ids(ids: Tensor, size: int, vocab_size: int) -> Tensor:
    """Validate a map from draft ids to target ids.

    Raises:
        ValueError: it has the wrong length, is unsorted, repeats an id, or leaves the target's vocabulary.
    """
    ids = ids.to(torch.long)
    if ids.shape != (size,):
        raise ValueError(f"the draft vocabulary has {tuple(ids.shape)} ids where the config says {size}")
    if bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise ValueError(
            f"the draft vocabulary must hold distinct sorted ids below {vocab_size}; was its map lost (all zero)?"
        )
    return ids
