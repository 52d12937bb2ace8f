"""A prefix cache at work: what texts decoded together take from it before they are read, and leave in it.

The prompt is remembered as soon as it has been read, so that others profit while this text goes on; the answer when
it has ended. A round that was interrupted leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from infer.fingerprint import fingerprint
from infer.prefix import Hit, PrefixCache

if TYPE_CHECKING:
    from infer.cache import ForgettingCache
    from infer.decode import Decoding


class Recall:
    """Between a prefix cache and one batch.

    Args:
        known: the prefix cache; None recalls and remembers nothing.
        taps: hidden states the drafters read.

    Raises:
        ValueError: the target's states depend on more than the tokens before them.
    """

    def __init__(self, known: PrefixCache | None, texts: Sequence[Decoding], taps: Sequence[int]) -> None:
        self.known, self.target, self.taps = known, texts[0].target, tuple(taps)
        self._states: list[list[Tensor]] = [[] for _ in texts]  # (1, n, taps·H) of what each text has committed
        self._model = None if known is None else fingerprint(self.target)  # once for all texts
        if known is not None:
            known.check(self.target)

    def begin(self, texts: Sequence[Decoding], cache: ForgettingCache) -> tuple[list[int], list[Tensor | None]]:
        """Put known beginnings into an empty cache.

        Returns:
            For each text how many tokens need not be read, and their taps (1, n, taps·H).
        """
        if self.known is None:
            return [0] * len(texts), [None] * len(texts)
        hits = [self.known.lookup(self.target, text.ids[0].tolist(), self.taps, self._model) for text in texts]
        lengths = [0 if hit is None else hit.length for hit in hits]
        for text, length in zip(texts, lengths, strict=True):
            text.stats.reused = length
        if any(lengths):
            _fill(cache, hits)
            cache.keep(lengths, [[] for _ in lengths])
        return lengths, [None if hit is None or hit.taps is None else hit.taps[None] for hit in hits]

    def read(self, text: int, taps: Tensor | None) -> None:
        """These rows (1, n, taps·H) of a text were committed; its prompt's first of all."""
        if self.known is not None and taps is not None:
            self._states[text].append(taps)

    def remember(self, text: int, decoding: Decoding, cache: ForgettingCache, row: int) -> None:
        """Store a text as far as the cache holds it, at ``row`` of the batch."""
        if self.known is None:
            return
        ids = decoding.tokens.view()[0, decoding.padding :].tolist()
        n = min(len(ids), cache.lengths[row])  # the last token has not been read; of a round cut short some need not be
        layers = []
        for layer in cache.forgetting:
            assert layer.store is not None
            keys, values = layer.store.view()
            layers.append((keys[row, :, :n], values[row, :, :n]))
        states = torch.cat(self._states[text], 1)[0, :n] if self.taps else None
        self.known.store(self.target, ids[:n], layers, self.taps, states, self._model)


def _fill(cache: ForgettingCache, hits: Sequence[Hit | None]) -> None:
    """Append each hit to its row; rows behind a hit's end, or without one, are filler."""
    some = next(hit for hit in hits if hit is not None)
    longest = max(hit.length for hit in hits if hit is not None)
    for at, layer in enumerate(cache.forgetting):
        both = []
        for part in range(2):
            like = some.layers[at][part]
            rows = like.new_zeros(len(hits), like.shape[0], longest, like.shape[2])
            for row, hit in enumerate(hits):
                if hit is not None:
                    rows[row, :, : hit.length] = hit.layers[at][part]
            both.append(rows)
        layer.update(*both)
