"""Decoding with heads that draft on their own outputs: committed rows in a key/value store, drafted nodes behind them.

The store holds one key/value pair a committed row, made from the target's own taps; of heads with a window those of the
last rows only. A draft appends pairs of its nodes, made from the heads' own outputs, and they are dropped before the
next draft::

      store: [ row n-w … row n-1 | node a, node b, … ]      a node attends all rows, its ancestors and itself
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from heads.attention import attend_stored
from heads.kv import KVStore

if TYPE_CHECKING:
    from heads.autoregressive import Autoregressive


class EagleState:
    """One text's committed context; rows that came since the last draft wait until the next one needs them.

    Attributes:
        rows: committed rows that the layer has read or passed over.
        kept: of these, how many the store holds.
    """

    def __init__(self, heads: Autoregressive, taps: Tensor, tokens: Tensor) -> None:
        layer = heads.layer
        self.heads, self.window = heads, heads.config.options["window"]
        self.store = KVStore(1, layer.kv_heads, layer.head_dim, dtype=heads.dtype, device=taps.device)
        self.rows = self.kept = 0
        self.taps, self.tokens = taps, tokens

    def commit(self, taps: Tensor, tokens: Tensor) -> None:
        """Add rows: taps (1, n, taps·H) of positions, tokens (1, n) that follow them."""
        waiting = self.taps.shape[1]
        self.taps = taps if not waiting else torch.cat([self.taps, taps], 1)
        self.tokens = tokens if not waiting else torch.cat([self.tokens, tokens], 1)

    def catch_up(self) -> Tensor:
        """Run the waiting rows through the layer; the last row's output (1, 1, H)."""
        heads = self.heads
        self.store.crop(self.kept)
        self.rows += self.taps.shape[1]
        taps, tokens = self.taps, self.tokens
        if self.window:  # a row's keys are its own: those that no draft will attend need not be made
            taps, tokens = taps[:, -self.window :], tokens[:, -self.window :]
            self.store.keep_last(self.window - taps.shape[1])
        g = heads.fuse(taps.to(heads.dtype))
        positions = torch.arange(self.rows - taps.shape[1], self.rows, device=g.device)[None]
        x, residual = heads.inputs(heads.target.embed(tokens).to(g.dtype), g)
        rotation = heads.rotation(positions, g.dtype)
        k, v = self.store.append(*heads.layer.keys_values(x, rotation))
        self.kept = self.store.length
        self.taps, self.tokens = self.taps[:, :0], self.tokens[:, :0]
        last = (rotation[0][:, :, -1:], rotation[1][:, :, -1:])
        return heads.layer(x[:, -1:], residual[:, -1:], last, lambda q: attend_stored(q, k, v))


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
        kept, drafted, n = state.kept, state.store.length - state.kept, len(nodes)
        token = torch.tensor([[tokens[node] for node in nodes]], device=state.tokens.device)
        hidden = torch.stack([heads.feed_back(self.outputs[parents[node]]) for node in nodes])[None]
        depth, node = 0, nodes[0]
        while node >= 0:
            depth, node = depth + 1, parents[node]
        # the root's row is rows - 1 and stands at that position; step j = depth stands j behind it
        positions = torch.full((1, n), state.rows - 1 + depth, device=hidden.device)
        rotation = heads.rotation(positions, hidden.dtype)
        x, residual = heads.inputs(heads.target.embed(token).to(hidden.dtype), hidden)
        k, v = state.store.append(*heads.layer.keys_values(x, rotation))
        mask = torch.zeros(n, kept + drafted + n, dtype=torch.bool, device=hidden.device)
        mask[:, :kept] = True
        for row, node in enumerate(nodes):
            before = self.seen.get(parents[node])
            if before is not None:
                mask[row, kept : kept + before.shape[0]] = before
            mask[row, kept + drafted + row] = True
            self.seen[node] = mask[row, kept:]
        all_seen = n == 1 and drafted < depth  # a chain sees all that is there
        out = heads.layer(x, residual, rotation, lambda q: attend_stored(q, k, v, None if all_seen else mask))
        for row, node in enumerate(nodes):
            self.outputs[node] = out[0, row]
        return heads.logits(out[0])
