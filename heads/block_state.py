"""Decoding with block heads: the context of each layer in a key/value store, and one pass for a whole draft.

The stores hold keys and values of committed positions only, with a window those of the last ones. The block's own stand
behind them while it is read, and are dropped at once::

      store of a layer: [ position a-w … a-1 | slot 0 … slot B-1 ]      each slot attends all of it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from heads.attention import attend_stored
from heads.best_first import Likeliest, Ranking, depth_of
from heads.kv import KVStore

if TYPE_CHECKING:
    from heads.block import Block


CANDIDATES = 128  # entries of a slot that a tree's bias is looked up for


class BlockState:
    """One text's context; taps that came since the last draft wait until the next one needs them."""

    def __init__(self, heads: Block, taps: Tensor, root: Tensor) -> None:
        dtype, o = heads.fc.weight.dtype, heads.config.options
        self.heads = heads
        self.stores = [
            KVStore(1, o["num_key_value_heads"], o["head_dim"], dtype=dtype, device=taps.device) for _ in heads.layers
        ]
        self.rows, self.window = 0, o["window"]
        self.taps, self.root = taps, root
        self._drafted: tuple[Tensor, Tensor] | None = None
        self._likeliest: dict[int, Likeliest] = {}

    def commit(self, taps: Tensor, root: Tensor) -> None:
        """Add positions: taps (1, n, taps·H), and the token (1, 1) that follows them."""
        self.taps = taps if not self.taps.shape[1] else torch.cat([self.taps, taps], 1)
        self.root, self._drafted = root, None
        self._likeliest.clear()

    def catch_up(self) -> None:
        """Put waiting taps into every layer's store."""
        if not self.taps.shape[1]:
            return
        self.rows += self.taps.shape[1]
        context = self.heads.context(self.taps[:, -self.window :])  # all of them where there is no window
        n = context.shape[1]
        positions = torch.arange(self.rows - n, self.rows, device=context.device)[None]
        rotation = self.heads.rotation(positions, context.dtype)
        for i, store in enumerate(self.stores):
            if self.window:
                store.keep_last(self.window - n)
            store.append(*self.heads.context_keys(i, context, rotation))
        self.taps = self.taps[:, :0]

    def drafted(self) -> tuple[Tensor, Tensor]:
        """The slots' normed outputs (slots, H) and unary logits (slots, Vd): one pass, kept until the next commit."""
        if self._drafted is None:
            self.catch_up()
            hidden = self.read_block()[:, self.heads.first_slot :]
            self._drafted = hidden[0], self.heads.unary(hidden)[0]
        return self._drafted

    def likeliest(self, k: int) -> Likeliest:
        """What slot k's tokens may be, behind any token."""
        if k not in self._likeliest:
            markov = self.heads.markov
            w2 = None if markov is None else markov.w2.weight
            self._likeliest[k] = Likeliest(self.drafted()[1][k], w2, CANDIDATES)
        return self._likeliest[k]

    def read_block(self) -> Tensor:
        """Normed outputs (1, slots, H) of a block on the root."""
        slots = self.heads.slots(self.root)[0]
        positions = torch.arange(self.rows, self.rows + slots.shape[1], device=slots.device)[None]

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            store, kept = self.stores[i], self.stores[i].length
            read = attend_stored(q, *store.append(k, v))
            store.crop(kept)
            return read

        return self.heads.run(slots, positions, attend)


class BlockGrower:
    """Answers for one draft from the slots' outputs; nodes of a depth share a slot and differ by their own tokens."""

    def __init__(self, state: BlockState) -> None:
        self.state, self.heads = state, state.heads
        self.stop_below = float(self.heads.config.options["stop_below"])
        self._last: tuple[int, Tensor] | None = None  # the slot of a chain and the token before it

    def first(self) -> Tensor:
        """Logits (Vd,) of the token after the root."""
        return self._slot(0, self.state.root[0])[0]

    def after(self, nodes: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Logits (len(nodes), Vd) of the slot as deep as the nodes' children.

        Raises:
            ValueError: the block has no such slot.
        """
        depth = self._check(depth_of(nodes[0], parents))
        return self._slot(depth, torch.tensor([tokens[node] for node in nodes], device=self.state.root.device))

    def ranked(self, node: int, tokens: Sequence[int], parents: Sequence[int], width: int) -> Ranking:
        """See :class:`heads.best_first.Ranked`: of the slot's own likeliest entries, behind the node's token.

        Raises:
            ValueError: the block has no such slot.
        """
        depth, markov = self._check(depth_of(node, parents)), self.heads.markov
        before = self.state.root[0, 0] if node < 0 else torch.tensor(tokens[node], device=self.state.root.device)
        return self.state.likeliest(depth).after(None if markov is None else markov.code(before), width)

    def chance(self) -> float | None:
        """See :class:`heads.grow.Doubting`: told from what stands before a token, whichever it will be (DSpark)."""
        if self.heads.confidence is None:
            return None
        assert self._last is not None, "asked once there are logits"
        k, before = self._last
        return float(self.heads.trust(self.state.drafted()[0][k : k + 1], before).sigmoid())

    def _check(self, depth: int) -> int:
        slots = self.heads.config.lookahead
        if depth >= slots:
            raise ValueError(f"a draft of depth {depth + 1} > {slots} slots of a block: ask for a shallower budget")
        return depth

    def _slot(self, k: int, before: Tensor) -> Tensor:
        self._last = k, before
        return self.heads.biased(self.state.drafted()[1][k : k + 1], before)
