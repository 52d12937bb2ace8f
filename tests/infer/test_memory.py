"""Memory while a long text is decoded: the caches, and next to nothing beside them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from heads.grow import Budget
from heads.kv import KVStore
from heads.target import Target
from infer import drafters
from infer.decode import Decoding
from infer.stopping import Stop
from tests.infer.fakes import FakeDrafter
from tests.infer.test_greedy import random_heads
from tests.tiny import tiny_model

POSITIONS = 4096
ALLOWED = 1.10  # of the caches' own size


@contextmanager
def only_new_objects() -> Iterator[None]:
    """Within, ``gc.get_objects`` knows what was made since."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def held() -> tuple[int, int]:
    """Bytes of all tensors made since, each storage once; and of the key/value stores among them."""
    storages: dict[int, int] = {}
    caches = 0
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif type(thing) is KVStore:
            caches += thing.keys.nbytes + thing.values.nbytes
    return sum(storages.values()), caches


def measure(model: Any, drafter: Any, new: int, budget: Budget) -> list[tuple[int, int, int]]:
    """At each round's end: tokens, bytes of tensors, bytes of caches."""
    prompt = torch.tensor([[7, 3, 44, 12]])
    found = []
    with only_new_objects():
        stop, say = Stop(prompt.shape[1] + new), LogitsProcessorList([say_the_same_again])
        decoding = Decoding(Target(model), prompt, drafter, budget, stop, processors=say)
        for _ in decoding.run():
            found.append((decoding.stats.tokens, *held()))
    return found


def say_the_same_again(ids: Tensor, scores: Tensor) -> Tensor:
    """A text with a period of 37, so that drafts are accepted and there are few rounds to look at."""
    scores[:, ids.shape[1] % 37] = 1e4
    return scores


@pytest.mark.parametrize(("name", "new"), [("none", 200), ("lookup|heads", 2000)])
def test_two_thousand_tokens_need_the_caches_and_ten_percent(name: str, new: int) -> None:
    model = tiny_model("llama", max_position_embeddings=POSITIONS)
    heads = random_heads(model, "eagle")
    found = measure(model, drafters.make(name, heads, heads.target), new, Budget(rows=14, depth=8, width=2))
    assert found[-1][0] == new
    assert all(total <= ALLOWED * caches for _, total, caches in found)
    layers = model.config.num_hidden_layers + (name != "none")
    position = 2 * 2 * 8 * 8  # keys and values, 2 heads of 8, float64
    assert found[-1][2] <= layers * position * 2 * (new + 20), "the caches themselves: at most twice what is stored"
    assert len(found) < 600, "drafts were accepted"


class Hoarder(FakeDrafter):
    """Planted leak: keeps the taps of every round."""

    def __init__(self) -> None:
        super().__init__((1, 2))
        self.kept: list[Tensor] = []

    def commit(self, taps: Tensor | None, ids: list[int]) -> None:
        super().commit(taps, ids)
        assert taps is not None
        self.kept.append(taps.clone())

    def draft(self, budget, sampler):  # type: ignore[no-untyped-def]
        from heads.draft import Draft

        return Draft.empty()


def test_a_drafter_that_keeps_every_rounds_taps_is_noticed() -> None:
    found = measure(tiny_model("llama", layers=2), Hoarder(), 80, Budget.chain(2))
    assert found[-1][1] > ALLOWED * found[-1][2]
