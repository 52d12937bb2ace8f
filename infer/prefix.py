"""Prefixes read before: a chat's next turn, or many prompts under one system text, are not prefilled twice.

    cache = infer.PrefixCache(max_bytes=2**30)
    infer.generate(model, first, prefix_cache=cache)
    infer.generate(model, longer, prefix_cache=cache)      # reads only what is new

Texts are kept as a radix tree over token ids; a node holds the keys and values of its own tokens, and the taps that
a drafter needed there, so what texts share is stored once::

    root ─ [system text] ─┬─ [question A, answer A] ─ [question B …]
                          └─ [question C …]

A state is found by the exact ids before it, on the same model object with the same weights, switches, dtype and
device (:mod:`infer.fingerprint`), and by nothing else.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from heads.target import Target
from infer.fingerprint import fingerprint

DEFAULT_BYTES = 2**30
# rotary embeddings whose angles change with the length of the whole text: a prefix read alone differs
LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})
Layers = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Hit:
    """What is known of a text's beginning.

    Attributes:
        length: tokens it covers, from 1 to all but the text's last one (whose pass gives the next token).
        layers: for each layer keys and values, (kv_heads, length, head_dim); copies, the caller's to keep.
        taps: (length, taps·H), None when no taps were asked for.
    """

    length: int
    layers: list[tuple[Tensor, Tensor]]
    taps: Tensor | None


@dataclass(eq=False)
class _Node:
    """A run of tokens behind its parent's, with their states."""

    ids: tuple[int, ...]
    layers: list[tuple[Tensor, Tensor]]
    taps: dict[int, Tensor]  # index of a hidden state → (len(ids), H)
    parent: _Node | None = None
    children: dict[int, _Node] = field(default_factory=dict)  # by their first token
    used: int = 0
    bytes: int = 0

    def __post_init__(self) -> None:
        self.weigh()

    def weigh(self) -> None:
        """Count its bytes, after any change."""
        self.bytes = sum(k.nbytes + v.nbytes for k, v in self.layers) + sum(t.nbytes for t in self.taps.values())

    def part(self, start: int, end: int) -> tuple[list[tuple[Tensor, Tensor]], dict[int, Tensor]]:
        """Copies: a view would keep the whole alive after the rest is forgotten."""
        layers = [(k[:, start:end].clone(), v[:, start:end].clone()) for k, v in self.layers]
        return layers, {index: states[start:end].clone() for index, states in self.taps.items()}

    def cut(self, start: int, end: int) -> None:
        """Forget all but a part."""
        self.layers, self.taps = self.part(start, end)
        self.ids = self.ids[start:end]
        self.weigh()

    def below(self) -> Iterator[_Node]:
        """All its descendants."""
        todo = list(self.children.values())
        while todo:
            node = todo.pop()
            yield node
            todo += node.children.values()


class PrefixCache:
    """States of earlier texts, bounded; those unused for longest are forgotten first. Safe to share by threads.

    In float64 and float32 a text comes out as without the cache. In half precision a prompt read in two parts rounds
    differently from one read at once, so near-ties may flip, as between any two ways of batching.

    Args:
        max_bytes: most that is held, 1 GiB where neither bound is given.
        max_tokens: most positions that are held.

    Attributes:
        asked: prompt tokens that calls came with so far.
        reused: those of them that were not read again.

    Raises:
        ValueError: a bound below 1.
    """

    def __init__(self, max_bytes: int | None = None, max_tokens: int | None = None) -> None:
        for name, bound in (("max_bytes", max_bytes), ("max_tokens", max_tokens)):
            if bound is not None and bound < 1:
                raise ValueError(f"{name} of a prefix cache is 1 or more, not {bound}")
        self.max_bytes = DEFAULT_BYTES if max_bytes is None and max_tokens is None else max_bytes
        self.max_tokens = max_tokens
        self.asked = self.reused = 0
        self._trees: WeakKeyDictionary[nn.Module, dict[Hashable, _Node]] = WeakKeyDictionary()
        self._clock = 0
        self._lock = threading.RLock()

    @property
    def bytes(self) -> int:
        """Held by keys, values and taps."""
        with self._lock:
            return sum(node.bytes for node in self._nodes())

    @property
    def tokens(self) -> int:
        """Positions held."""
        with self._lock:
            return sum(len(node.ids) for node in self._nodes())

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._trees.clear()

    def check(self, target: Target) -> None:
        """Refuse a target whose states depend on more than the tokens before them.

        Raises:
            ValueError: an encoder-decoder, or rotary embeddings that change with the text's length.
        """
        if getattr(target.config, "is_encoder_decoder", False):
            raise ValueError(
                f"prefix_cache is not supported for {target.name}: its states depend on the encoder's text"
            )
        rope = getattr(target.config, "rope_parameters", None) or {}
        each = [rope] if "rope_type" in rope else [part for part in rope.values() if isinstance(part, dict)]
        wrong = [str(part.get("rope_type")) for part in each if part.get("rope_type") in LENGTH_DEPENDENT]
        if wrong:
            raise ValueError(
                f"prefix_cache is not supported for {target.name}: its {wrong[0]!r} rotary embedding changes "
                "with the length of the whole text"
            )

    def lookup(
        self, target: Target, ids: Sequence[int], taps: Sequence[int] = (), known_as: Hashable = None
    ) -> Hit | None:
        """The longest known beginning of a text, its last token left to be read.

        Args:
            target: what will go on.
            ids: the whole prompt, without padding.
            taps: hidden states that the drafter needs; a beginning stored without them does not count.
            known_as: the target's fingerprint, where it has just been taken.
        """
        with self._lock:
            self.asked += len(ids)
            root = self._trees.get(target.model, {}).get(known_as or fingerprint(target))
            path = [] if root is None else self._known(root, tuple(ids[:-1]), taps)
            if not path:
                return None
            self._clock += 1
            for node, _ in path:
                node.used = self._clock
            length = sum(matched for _, matched in path)
            self.reused += length
            layers = [
                (
                    torch.cat([node.layers[at][0][:, :matched] for node, matched in path], 1),
                    torch.cat([node.layers[at][1][:, :matched] for node, matched in path], 1),
                )
                for at in range(len(path[0][0].layers))
            ]
            states = [torch.cat([node.taps[index] for index in taps], -1)[:matched] for node, matched in path if taps]
            return Hit(length, layers, torch.cat(states) if taps else None)

    def store(
        self,
        target: Target,
        ids: Sequence[int],
        layers: Layers,
        taps: Sequence[int] = (),
        states: Tensor | None = None,
        known_as: Hashable = None,
    ) -> None:
        """Remember a text.

        Args:
            target: what read it.
            ids: n tokens, from the text's first one.
            layers: for each layer keys and values, (kv_heads, n, head_dim); copied.
            taps, states: which hidden states, (n, taps·H) of them; copied.
            known_as: the target's fingerprint, where it has been taken when ``ids`` were read.
        """
        columns: dict[int, Tensor] = {}
        if states is not None and taps:
            columns = dict(zip(taps, states.chunk(len(taps), -1), strict=True))
        whole = _Node(tuple(ids), list(layers), columns)
        with self._lock:
            self._clock += 1
            kept = self._trees.setdefault(target.model, {})
            self._insert(kept.setdefault(known_as or fingerprint(target), _Node((), [], {})), whole)
            self._forget()

    def _known(self, root: _Node, ids: tuple[int, ...], taps: Sequence[int]) -> list[tuple[_Node, int]]:
        """Nodes along a text, with how many of their tokens it shares."""
        path: list[tuple[_Node, int]] = []
        node, at = root, 0
        while at < len(ids):
            child = node.children.get(ids[at])
            if child is None or any(index not in child.taps for index in taps):
                break
            matched = _common(child.ids, ids, at)
            path.append((child, matched))
            if matched < len(child.ids):
                break
            node, at = child, at + matched
        return path

    def _insert(self, root: _Node, whole: _Node) -> None:
        node, at = root, 0
        while at < len(whole.ids):
            child = node.children.get(whole.ids[at])
            if child is None:
                node.children[whole.ids[at]] = _Node(
                    whole.ids[at:], *whole.part(at, len(whole.ids)), parent=node, used=self._clock
                )
                return
            matched = _common(child.ids, whole.ids, at)
            if matched < len(child.ids):
                child = self._split(child, matched)
            new = whole.taps.keys() - child.taps.keys()
            child.taps |= {index: whole.taps[index][at : at + matched].clone() for index in new}
            child.weigh()
            child.used = self._clock
            node, at = child, at + matched

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut a node in two; the first part, which keeps the place among its siblings."""
        first = _Node(node.ids[:at], *node.part(0, at), parent=node.parent, used=node.used)
        node.cut(at, len(node.ids))
        node.parent = first
        first.children[node.ids[0]] = node
        assert first.parent is not None
        first.parent.children[first.ids[0]] = first
        return first

    def _forget(self) -> None:
        """Drop the ends of texts, those unused for longest first, until what is held is within bounds."""
        while share := self._too_much():
            leaf = min((node for node in self._nodes() if not node.children), key=lambda node: node.used)
            excess, per_token = share[0], leaf.bytes / len(leaf.ids) if share[1] else 1
            keep = len(leaf.ids) - math.ceil(excess / per_token)
            assert leaf.parent is not None
            if leaf.used == self._clock and keep > 0:  # the text just stored is too long by itself: keep its beginning
                leaf.cut(0, keep)
            else:
                del leaf.parent.children[leaf.ids[0]]
        for kept in self._trees.values():
            for key in [key for key, root in kept.items() if not root.children]:
                del kept[key]

    def _too_much(self) -> tuple[int, bool] | None:
        """What is over a bound, and whether in bytes; None when nothing is."""
        if self.max_bytes is not None and self.bytes > self.max_bytes:
            return self.bytes - self.max_bytes, True
        if self.max_tokens is not None and self.tokens > self.max_tokens:
            return self.tokens - self.max_tokens, False
        return None

    def _nodes(self) -> Iterator[_Node]:
        for kept in self._trees.values():
            for root in kept.values():
                yield from root.below()


def _common(known: tuple[int, ...], ids: tuple[int, ...], at: int) -> int:
    """How many tokens ``known`` shares with ``ids[at:]``."""
    length = min(len(known), len(ids) - at)
    if known[:length] == ids[at : at + length]:
        return length
    return next(i for i in range(length) if known[i] != ids[at + i])
