"""Near-ties: telling a rounding flip from a wrong decoder.

A pass over N rows and N passes over one row round differently, so in half precision the two best tokens may change
places when they are all but equal. How close is close enough is not guessed: it is
the 99.9th percentile of how far the target's own logits move between the two kinds of pass, measured with
transformers' cache and no decoder of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from heads.target import Target

FLOAT32_GAP = 1e-4  # a float32 flip may happen once in some 100,000 positions, between tokens this close
PERCENTILE = 0.999


@dataclass(frozen=True)
class Difference:
    """Where two texts part.

    Attributes:
        position: index among the new tokens.
        ours, theirs: the two tokens; None where a text has ended.
        gap: |logit(ours) − logit(theirs)| in a pass of the target over the common prefix; infinite for an end.
    """

    position: int
    ours: int | None
    theirs: int | None
    gap: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; an infinite gap is None."""
        return asdict(self) | {"gap": self.gap if self.gap < float("inf") else None}


def first_difference(target: Target, prompt: Tensor, ours: Sequence[int], theirs: Sequence[int]) -> Difference | None:
    """The first place where two answers to ``prompt`` (1, n) differ, re-scored; None when they are equal."""
    if list(ours) == list(theirs):
        return None
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    if at == min(len(ours), len(theirs)):
        return Difference(at, _get(ours, at), _get(theirs, at), float("inf"))
    prompt = prompt.to(target.device)
    prefix = torch.cat([prompt, prompt.new_tensor([list(ours[:at])])], 1)
    logits = target.forward(prefix, logits_to_keep=1).logits[0, -1].double()
    return Difference(at, ours[at], theirs[at], abs(float(logits[ours[at]] - logits[theirs[at]])))


def _get(tokens: Sequence[int], at: int) -> int | None:
    return tokens[at] if at < len(tokens) else None


def logit_noise(target: Target, texts: Sequence[tuple[Tensor, Sequence[int]]], rows: int) -> float:
    """The 99.9th percentile of |logit of a one-row pass − logit of a ``rows``-row pass|, over all tokens of all rows.

    Args:
        target: the target.
        texts: prompts (1, n) and answers to read behind them.
        rows: rows of the wide pass, as many as a round verifies.

    Raises:
        ValueError: the texts are empty.
    """
    moved = [
        (_read(target, prompt, new, 1) - _read(target, prompt, new, rows)).abs().flatten()
        for prompt, new in texts
        if new
    ]
    if not moved:
        raise ValueError("rounding noise needs a text to read: all answers are empty")
    noise = torch.cat(moved)
    return float(noise.kthvalue(max(1, int(PERCENTILE * noise.numel()))).values)


def _read(target: Target, prompt: Tensor, new: Sequence[int], rows: int) -> Tensor:
    """Float32 logits (len(new), V) after each token of ``new``, read ``rows`` at a time."""
    cache = DynamicCache(config=target.model.config)
    prompt = prompt.to(target.device)
    target.forward(prompt, cache=cache, logits_to_keep=1)
    answer = prompt.new_tensor([list(new)])
    parts = [target.forward(answer[:, at : at + rows], cache=cache).logits[0] for at in range(0, answer.shape[1], rows)]
    return torch.cat(parts).float()
