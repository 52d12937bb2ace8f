"""Decoding with mtp heads: what the last pass said behind the committed text, and the draft that comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from heads.mtp import Mtp


class MtpState:
    """One text: its last token, and the states (m, H) of the masks behind what stands before that token."""

    def __init__(self, root: Tensor, states: Tensor) -> None:
        self.root, self.states = root, states


class MtpGrower:
    """Answers for one draft; nodes of a depth share a mask's state and differ by their own tokens.

    Raises:
        ValueError: from a question that is deeper than there were masks.
    """

    def __init__(self, heads: Mtp, state: MtpState) -> None:
        self.heads, self.state = heads, state

    def first(self) -> Tensor:
        """Logits (Vd,) of the token after the root."""
        return self._slot(0, self.state.root[0])[0]

    def after(self, nodes: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Logits (len(nodes), Vd) of the mask as deep as the nodes' children."""
        depth, node = 0, nodes[0]
        while node >= 0:
            depth, node = depth + 1, parents[node]
        return self._slot(depth, torch.tensor([tokens[node] for node in nodes], device=self.state.root.device))

    def _slot(self, k: int, before: Tensor) -> Tensor:
        if k >= len(self.state.states):
            raise ValueError(
                f"a draft of depth {k + 1} > {len(self.state.states)} masks of the last pass: ask for a shallower one"
            )
        return self.heads.logits(self.state.states[k : k + 1], before)
