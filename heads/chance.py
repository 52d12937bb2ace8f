"""Drawing one token, and cutting to a nucleus, without sorting a vocabulary.

A draw by inverting the cumulative distribution takes one random number and one pass over the weights. A nucleus is
usually a few hundred tokens of fifty thousand, so the likeliest few are looked at first and more only where they do
not reach the mass asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

FEW, MORE = 256, 8  # tokens looked at first; how many times as many the next time
CLOSE = 2e-6  # mass; rounding in sums over a vocabulary stays below it


def draw(weights: Tensor, generator: torch.Generator | None = None) -> int:
    """An index of (V,) weights, drawn in proportion to them; one of weight 0 never comes.

    Raises:
        ValueError: the weights are not finite, or none is above 0.
    """
    reached = weights.cumsum(-1, dtype=torch.float64)
    total = float(reached[-1])
    if not 0 < total < float("inf"):
        raise ValueError(f"weights to draw from must be finite, and one above 0: they add up to {total}")
    device = weights.device if generator is None else generator.device
    at = torch.rand(1, dtype=torch.float64, generator=generator, device=device).to(weights.device) * total
    index = int(torch.searchsorted(reached, at, right=True))
    while index >= len(weights) or not weights[index] > 0:  # the product was rounded up to the total
        index -= 1
    return index


def nucleus(probabilities: Tensor, top_p: float) -> Tensor | None:
    """Indices of the likeliest entries of (V,) that together reach the mass ``top_p``, the likeliest first.

    At least one. None where it hangs on rounding or on the order of equal entries which of them belong to it, so that
    a caller who must agree with another implementation asks that one.
    """
    size = probabilities.shape[-1]
    count = min(FEW, size)
    while True:
        values, indices = probabilities.topk(count)
        reached = values.cumsum(-1, dtype=torch.float64)
        if count == size or float(reached[-1]) >= top_p + CLOSE:
            break
        count = min(count * MORE, size)
    before = reached - values  # mass of those likelier than each
    inside = max(1, int((before < top_p).sum()))
    if inside < count:
        unclear = bool(((before[1:] - top_p).abs() < CLOSE).any())
        if unclear or values[inside - 1] == values[inside]:
            return None
    return indices[:inside]
