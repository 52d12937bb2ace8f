"""The key/value store against a list of lists: whatever is appended, cropped, kept or reordered, both hold the same."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from heads.kv import KVStore

HEADS, DIM = 2, 3


def entries(numbers: list[list[int]], dim: int = DIM) -> Tensor:
    """(batch, HEADS, n, dim) keys, every one telling its number, head and place."""
    values = torch.tensor(numbers, dtype=torch.float64)[:, None, :, None] * 100
    return values + torch.arange(HEADS)[:, None, None] * 10 + torch.arange(dim)


@dataclass
class Model:
    """What the store should hold: one list of numbers a row."""

    rows: list[list[int]]
    store: KVStore
    next: int = 1
    seen: list[int] = field(default_factory=list)

    def append(self, n: int) -> None:
        fresh = [[self.next + row * n + i for i in range(n)] for row in range(len(self.rows))]
        self.next += n * len(self.rows)
        self.rows = [old + new for old, new in zip(self.rows, fresh, strict=True)]
        k = entries(fresh).reshape(len(self.rows), HEADS, n, DIM)
        keys, values = self.store.append(k, -k)
        self.check(keys, values)

    def check(self, keys: Tensor, values: Tensor) -> None:
        longest = max(map(len, self.rows))
        assert self.store.lengths == [len(row) for row in self.rows] and self.store.length == longest
        assert keys.shape == values.shape == (len(self.rows), HEADS, longest, DIM)
        for i, row in enumerate(self.rows):
            if row:
                assert torch.equal(keys[i : i + 1, :, : len(row)], entries([row]))
                assert torch.equal(values[i : i + 1, :, : len(row)], -entries([row]))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.data())
def test_it_holds_what_a_list_would(data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, 3))
    store = KVStore(batch, HEADS, DIM, dtype=torch.float64, device="cpu", capacity=data.draw(st.integers(1, 4)))
    model = Model([[] for _ in range(batch)], store)
    for _ in range(data.draw(st.integers(1, 8))):
        action = data.draw(st.sampled_from(["append", "append", "crop", "keep", "select"]))
        if action == "append":
            model.append(data.draw(st.integers(1, 5)))
        elif action == "crop":
            length = data.draw(st.integers(0, 9))
            model.rows = [row[:length] for row in model.rows]
            store.crop(length)
        elif action == "keep":
            bases = [data.draw(st.integers(0, len(row))) for row in model.rows]
            if data.draw(st.booleans()):
                bases = [min(bases)] * len(bases)
            places = [range(len(row) - base) for row, base in zip(model.rows, bases, strict=True)]
            paths = [sorted(data.draw(st.sets(st.sampled_from(p)) if p else st.just(set()))) for p in places]
            model.rows = [
                row[:base] + [row[base + p] for p in path]
                for row, base, path in zip(model.rows, bases, paths, strict=True)
            ]
            store.keep(bases[0] if len(set(bases)) == 1 else bases, paths)
        else:
            order = data.draw(st.lists(st.integers(0, len(model.rows) - 1), min_size=1, max_size=4))
            model.rows = [list(model.rows[row]) for row in order]
            store.select(order)
        model.check(*store.view())


def test_a_tree_round_by_hand() -> None:
    store = KVStore(1, HEADS, DIM, dtype=torch.float64, device="cpu", capacity=2)
    store.append(entries([[1, 2]]), entries([[1, 2]]))
    store.append(entries([[3, 4, 5, 6]]), entries([[3, 4, 5, 6]]))  # the root and three nodes
    store.keep(2, [[0, 2]])
    assert torch.equal(store.view()[0], entries([[1, 2, 3, 5]]))
    keys, _ = store.append(entries([[7]]), entries([[7]]))
    assert torch.equal(keys, entries([[1, 2, 3, 5, 7]]))


def test_growth_keeps_everything_and_at_least_doubles() -> None:
    store = KVStore(1, HEADS, DIM, dtype=torch.float64, device="cpu", capacity=4)
    for number in range(1, 40):
        store.append(entries([[number]]), entries([[number]]))
    assert torch.equal(store.view()[1], entries([list(range(1, 40))]))
    assert store.keys.shape[2] == 64
    with pytest.raises(ValueError, match="capacity"):
        KVStore(1, HEADS, DIM, dtype=torch.float64, device="cpu", capacity=0)  # doubling nothing would never end


def test_values_may_be_of_another_width() -> None:
    store = KVStore(2, HEADS, DIM, dtype=torch.float64, device="cpu", value_dim=5)
    k, v = store.append(entries([[1], [2]]), entries([[1], [2]], 5))
    assert k.shape == (2, HEADS, 1, DIM) and torch.equal(v, entries([[1], [2]], 5))
