"""Decoding with hydra heads: the prefix layer's store of committed rows, and nodes that know the tokens on their path.

Nothing drafted ever enters the store; with a window it holds the last rows only. A node's head reads the state of the
last committed row and the embeddings of the root, of the node's ancestors and of the node itself, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from heads.attention import attend_stored
from heads.kv import KVStore

if TYPE_CHECKING:
    from heads.hydra import Hydra


class HydraState:
    """One text's committed rows; those that came since the last draft wait until the next one needs them."""

    def __init__(self, heads: Hydra, taps: Tensor, root: Tensor) -> None:
        layer, o = heads.layer, heads.config.options
        self.heads, self.window = heads, o["window"]
        self.store = (
            KVStore(1, layer.kv_heads, layer.head_dim, dtype=heads.dtype, device=taps.device)
            if layer is not None
            else None
        )
        self.rows = 0
        self.taps, self.root = taps, root
        self._drafted: Tensor | None = None

    def commit(self, taps: Tensor, root: Tensor) -> None:
        """Add rows: taps (1, n, taps·H), and the token (1, 1) that follows the last."""
        self.taps = taps if not self.taps.shape[1] else torch.cat([self.taps, taps], 1)
        self.root, self._drafted = root, None

    def drafted(self) -> Tensor:
        """What the heads read of the last committed row, (H,); kept until the next commit."""
        if self._drafted is None:
            self._drafted = self.catch_up()
        return self._drafted

    def catch_up(self) -> Tensor:
        """Run the waiting rows through the prefix layer; the last row's output (H,)."""
        heads, layer = self.heads, self.heads.layer
        self.rows += self.taps.shape[1]
        if layer is None or self.store is None:
            last = heads.fuse(self.taps[:, -1:])
            self.taps = self.taps[:, :0]
            return last[0, 0]
        h = heads.fuse(self.taps[:, -self.window :])  # all of them where there is no window
        n = h.shape[1]
        x = layer.input_layernorm(h)
        rotation = heads.rotation(torch.arange(self.rows - n, self.rows, device=h.device)[None], h.dtype)
        if self.window:
            self.store.keep_last(self.window - n)
        k, v = self.store.append(*layer.keys_values(x, rotation))
        self.taps = self.taps[:, :0]
        end = (rotation[0][:, :, -1:], rotation[1][:, :, -1:])
        return layer(x[:, -1:], h[:, -1:], end, lambda q: attend_stored(q, k, v))[0, 0]


class HydraGrower:
    """Answers for one draft; nodes of a depth share a head and differ by the tokens on their paths."""

    def __init__(self, state: HydraState) -> None:
        self.state, self.heads = state, state.heads
        self.read: dict[int, Tensor] = {}  # node → embeddings of its path, from the root

    def first(self) -> Tensor:
        """Logits (Vd,) of head 0."""
        self.read[-1] = self.heads.embed(self.state.root[0, 0])
        return self.heads.head(0, self.state.drafted(), self.read[-1])

    def after(self, nodes: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Logits (len(nodes), Vd) of the head that is as deep as the nodes' children.

        Raises:
            ValueError: there is no such head.
        """
        depth, node = 0, nodes[0]
        while node >= 0:
            depth, node = depth + 1, parents[node]
        heads = self.heads.config.lookahead
        if depth >= heads:
            raise ValueError(f"a draft of depth {depth + 1} > {heads} heads: ask for a shallower budget")
        own = self.heads.embed(torch.tensor([tokens[node] for node in nodes], device=self.state.root.device))
        for node, embedded in zip(nodes, own, strict=True):
            self.read[node] = torch.cat([self.read[parents[node]], embedded])
        state = self.state.drafted().expand(len(nodes), -1)
        return self.heads.head(depth, state, torch.stack([self.read[node] for node in nodes]))
