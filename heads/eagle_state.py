"""Decoding with EAGLE heads: committed rows in a key/value store, drafted nodes behind them.

The store holds one key/value pair a committed row, made from the target's own taps. A draft appends pairs of its
nodes, made from the heads' own outputs, and they are dropped before the next draft::

      store: [ row 0 … row n-1 | node a, node b, … ]      a node attends all rows, its ancestors and itself
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from heads.kv import KVStore

if TYPE_CHECKING:
    from heads.eagle import Eagle


class EagleState:
    """One row's committed context; rows that came since the last draft wait until the next one needs them."""

    def __init__(self, heads: Eagle, taps: Tensor, tokens: Tensor) -> None:
        layer = heads.layer
        self.heads = heads
        self.store = KVStore(1, layer.kv_heads, layer.head_dim, dtype=heads.fc.weight.dtype, device=taps.device)
        self.rows = 0
        self.taps, self.tokens = taps, tokens

    def commit(self, taps: Tensor, tokens: Tensor) -> None:
        """Add rows: taps (1, n, taps·H) of positions, tokens (1, n) that follow them."""
        waiting = self.taps.shape[1]
        self.taps = taps if not waiting else torch.cat([self.taps, taps], 1)
        self.tokens = tokens if not waiting else torch.cat([self.tokens, tokens], 1)

    def catch_up(self) -> Tensor:
        """Run the waiting rows through the layer; the last row's output (1, 1, H)."""
        heads = self.heads
        self.store.crop(self.rows)
        n = self.taps.shape[1]
        g = heads.fuse(self.taps.to(heads.fc.weight.dtype))
        positions = torch.arange(self.rows, self.rows + n, device=g.device)[None]
        x = heads.layer.inputs(heads.target.embed(self.tokens).to(g.dtype), g)
        rotation = heads.rotation(positions, g.dtype)
        k, v = self.store.append(*heads.layer.keys_values(x, rotation))
        self.rows += n
        self.taps, self.tokens = self.taps[:, :0], self.tokens[:, :0]
        last = (rotation[0][:, :, -1:], rotation[1][:, :, -1:])
        return heads.layer(x[:, -1:], g[:, -1:], last, lambda q: _attend(q, k, v, None))


class EagleGrower:
    """Answers for one draft; remembers each node's output and where its key lies in the store."""

    def __init__(self, state: EagleState) -> None:
        self.state, self.heads = state, state.heads
        self.outputs: dict[int, Tensor] = {}
        self.seen: dict[int, Tensor] = {}

    def first(self) -> Tensor:
        """Logits (Vd,) of the token after the root."""
        if not self.state.taps.shape[1]:
            raise ValueError("nothing was committed since the last draft: advance the state first")
        out = self.state.catch_up()
        self.outputs[-1] = out[0, 0]
        return self.heads.logits(out[0, 0])

    def after(self, nodes: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Logits (len(nodes), Vd): one step of the layer over nodes of one depth."""
        heads, state = self.heads, self.state
        rows, drafted, n = state.rows, state.store.length - state.rows, len(nodes)
        token = torch.tensor([[tokens[node] for node in nodes]], device=state.tokens.device)
        hidden = torch.stack([heads.feed_back(self.outputs[parents[node]]) for node in nodes])[None]
        depth, node = 0, nodes[0]
        while node >= 0:
            depth, node = depth + 1, parents[node]
        # the root's row is rows - 1 and stands at that position; step j = depth stands j behind it
        positions = torch.full((1, n), rows - 1 + depth, device=hidden.device)
        rotation = heads.rotation(positions, hidden.dtype)
        x = heads.layer.inputs(heads.target.embed(token).to(hidden.dtype), hidden)
        k, v = state.store.append(*heads.layer.keys_values(x, rotation))
        mask = torch.zeros(n, rows + drafted + n, dtype=torch.bool, device=hidden.device)
        mask[:, :rows] = True
        for row, node in enumerate(nodes):
            before = self.seen.get(parents[node])
            if before is not None:
                mask[row, rows : rows + before.shape[0]] = before
            mask[row, rows + drafted + row] = True
            self.seen[node] = mask[row, rows:]
        all_seen = n == 1 and drafted < depth  # a chain sees all that is there
        out = heads.layer(x, hidden, rotation, lambda q: _attend(q, k, v, None if all_seen else mask))
        for row, node in enumerate(nodes):
            self.outputs[node] = out[0, row]
        return heads.logits(out[0])


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of (1, heads, n, D) queries over (1, kv_heads, L, D), all visible or as ``mask`` (n, L) shows."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
