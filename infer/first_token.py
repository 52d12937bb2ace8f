"""How long the first token takes with a prefix cache and without: both in one run, in turn.

print(first_token(target, [[system, question] for question in questions]).ratio)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from infer.generate import generate
from infer.prefix import PrefixCache


@dataclass(frozen=True)
class FirstToken:
    """Seconds from the prompt to its first token, medians over prompts.

    Attributes:
        without, recalled: without a cache, and with one that earlier prompts have filled.
        ratio: median over prompts of without ÷ recalled, each pair measured side by side.
        read: prompt tokens read in all with the cache.
        asked: prompt tokens in all.
    """

    without: float
    recalled: float
    ratio: float
    read: int
    asked: int


def first_token(target: Any, prompts: Sequence[Any], *, tokenizer: Any = None) -> FirstToken:
    """Measure prompts that share beginnings, such as a system text or the turns of a chat.

    The first prompt warms up and fills the cache; it is not counted.

    Args:
        target: as for :func:`infer.generate`.
        prompts: two or more, in the order in which they would come.

    Raises:
        ValueError: fewer than two prompts.
    """
    if len(prompts) < 2:
        raise ValueError(f"a prefix is recalled from the second prompt on: {len(prompts)} given")
    cache = PrefixCache()
    settings: dict[str, Any] = {"tokenizer": tokenizer, "max_new_tokens": 1, "do_sample": False}
    pairs, read, asked = [], 0, 0
    for at, prompt in enumerate(prompts):
        plain = generate(target, prompt, **settings)
        recalled = generate(target, prompt, prefix_cache=cache, **settings)
        if not at:
            continue
        pairs.append((plain.stats.prefill_seconds, recalled.stats.prefill_seconds))
        length = plain.sequences.shape[1] - 1
        asked, read = asked + length, read + length - recalled.stats.reused
    return FirstToken(
        without=median(a for a, _ in pairs),
        recalled=median(b for _, b in pairs),
        ratio=median(a / b for a, b in pairs),
        read=read,
        asked=asked,
    )
