"""The committed token ids of one row, appended without copying what is there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Tokens:
    """Prompt and answer so far, in a preallocated buffer that doubles.

    Args:
        prompt: (1, n) token ids.
    """

    def __init__(self, prompt: Tensor) -> None:
        n = prompt.shape[1]
        self._buffer = prompt.new_empty(1, max(64, 2 * n))
        self._buffer[:, :n] = prompt
        self._length = n
        self.last = int(prompt[0, -1])

    def __len__(self) -> int:
        return self._length

    def append(self, token: int) -> None:
        """Commit one token."""
        self._reserve(self._length + 1)
        self._buffer[0, self._length] = token
        self._length += 1
        self.last = token

    def view(self) -> Tensor:
        """(1, n) committed ids, not copied."""
        return self._buffer[:, : self._length]

    def followed_by(self, tokens: Sequence[int]) -> Tensor:
        """(1, n + len(tokens)) committed ids with uncommitted ones behind them: the prefix a drafted node simulates."""
        end = self._length + len(tokens)
        self._reserve(end)
        if tokens:
            self._buffer[0, self._length : end] = torch.as_tensor(tokens, device=self._buffer.device)
        return self._buffer[:, :end]

    def _reserve(self, length: int) -> None:
        capacity = self._buffer.shape[1]
        if length > capacity:
            larger = self._buffer.new_empty(1, max(length, 2 * capacity))
            larger[:, : self._length] = self.view()
            self._buffer = larger
