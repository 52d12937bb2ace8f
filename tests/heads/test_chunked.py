"""Memory of a training unroll: it does not grow with length × vocabulary, whichever kind drafts."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import heads.chunked as chunked
from heads.base import DraftHeads
from heads.kinds import KINDS
from heads.target import Target
from tests.heads.small import batch_of, random_ids, small_heads, soft_ce
from tests.tiny import tiny_model

VOCAB = 16384


class Alive(TorchDispatchMode):
    """Bytes of the storages made while it is on, those that are alive at once at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and (key := leaf.untyped_storage()._cdata) not in self._known | before:
                self._known.add(key)
                size = leaf.untyped_storage().nbytes()
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(leaf.untyped_storage(), self._gone, key, size)
        return out

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def most_alive(heads: DraftHeads, length: int) -> int:
    """Peak bytes of a loss and its gradients over one text."""
    batch = batch_of(heads.target, heads.config.taps, random_ids(length, vocab=64))
    with Alive() as alive:
        heads.loss(batch, soft_ce).total.backward()
    heads.zero_grad()
    return alive.most


def made(kind: str, draft_vocab: int | None = None, vocab: int = VOCAB, **options: Any) -> DraftHeads:
    target = Target(tiny_model("llama", dtype=torch.float32, vocab=vocab))
    target.model.requires_grad_(False)
    return small_heads(kind, target, draft_vocab=draft_vocab, **options)


def growth(heads: DraftHeads) -> int:
    """Bytes that 100 tokens more take."""
    return most_alive(heads, 150) - most_alive(heads, 50)


@pytest.mark.parametrize("kind", KINDS)
def test_it_does_not_grow_with_length_times_vocabulary(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 tokens more are 100 rows more at each of three positions; logits of one would be 6.6 MB."""
    monkeypatch.setattr(chunked, "PASS_ROWS", 32)
    monkeypatch.setattr(chunked, "PASS_ENTRIES", 32 * VOCAB)
    monkeypatch.setitem(chunked.CHUNK_ENTRIES, "cpu", 16 * VOCAB)
    heads = made(kind)
    logits = 4 * VOCAB * 100
    elsewhere = growth(
        made(kind, vocab=64)
    )  # what attention takes, inside the target too, is no matter of vocabularies
    assert growth(heads) - elsewhere < logits, "not even one position's"
    # the same, all rows in one part, does grow: by draft logits and their gradients, and by the target's logits
    monkeypatch.setattr(chunked, "PASS_ROWS", 10**6)
    assert growth(heads) - elsewhere > 2 * logits
