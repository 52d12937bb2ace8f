"""Training and held-out prompts apart, by the rule of :mod:`data.overlap`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data.overlap import Closest, Index, closest


@dataclass(frozen=True)
class Split:
    """Places of the prompts on each side, ascending, the closest pair, and how many prompts had to stay in training.

    ``closest`` counts within the sides: ``train[closest.train]`` is the training prompt's place.
    """

    train: list[int]
    heldout: list[int]
    closest: Closest
    passed_over: int

    def describe(self, prompts: Sequence[str]) -> dict[str, Any]:
        """The split in counts and its closest pair in words, for a report or a provenance file."""
        return {
            "train": len(self.train),
            "heldout": len(self.heldout),
            "passed_over": self.passed_over,
            "closest_pair": {
                "similarity": round(self.closest.similarity, 4),
                "common_run_of_words": self.closest.run,
                "train": prompts[self.train[self.closest.train]],
                "heldout": prompts[self.heldout[self.closest.heldout]],
            },
        }


def _order(prompt: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}\n{prompt}".encode()).digest()


def wanted(heldout: float, total: int) -> int:
    """A fraction below 1 or a whole count → a count.

    Raises:
        ValueError: it leaves one side empty, or is a broken number above 1.
    """
    count = round(heldout * total) if 0 < heldout < 1 else heldout
    if count != int(count) or not 0 < count < total:
        raise ValueError(
            f"{heldout:g} of {total} conversations cannot be held out: give a fraction or a count that leaves some"
        )
    return int(count)


def split(prompts: Sequence[str], heldout: float, seed: int = 0) -> Split:
    """Choose held-out prompts: in an order given by their hash, those that are close to no other prompt at all.

    Prompts with a near-double stay in training, both of them, so that nothing is thrown away and the held-out
    prompts also differ among themselves. The same prompts and seed give the same split, whatever their order.

    Args:
        prompts: the user's text of each conversation.
        heldout: fraction (below 1) or count.
        seed: another seed, another choice.

    Raises:
        ValueError: ``heldout`` is out of range, or too few prompts are apart from all others.
    """
    count = wanted(heldout, len(prompts))
    index = Index(prompts)
    chosen: list[int] = []
    passed = 0
    for place in sorted(range(len(prompts)), key=lambda i: _order(prompts[i], seed)):
        if len(chosen) == count:
            break
        if index.close(prompts[place]) - {place}:
            passed += 1
        else:
            chosen.append(place)
    if len(chosen) < count:
        raise ValueError(
            f"only {len(chosen)} of {len(prompts)} prompts are unlike all others, {count} were wanted: hold out fewer"
        )
    chosen.sort()
    held = set(chosen)
    train = [i for i in range(len(prompts)) if i not in held]
    return Split(train, chosen, closest([prompts[i] for i in train], [prompts[i] for i in chosen]), passed)
