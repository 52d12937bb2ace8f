"""Passes side by side: the results of one after another, threads given back, faults not swallowed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from heads.target import Target
from tests.tiny import tiny_model
from tests.train.world import conversations
from train import cache_build, shards
from train.cache import CacheSpec, build
from train.ranks import Ranks
from train.workers import side_by_side

CPU = torch.device("cpu")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_results_come_in_order_from_workers_of_one_thread_each() -> None:
    seen: set[int] = set()

    def slow_first(item: int) -> tuple[int, int]:
        seen.add(threading.get_ident())
        time.sleep(0.05 if item == 0 else 0.0)
        return item, torch.get_num_threads()

    assert list(side_by_side(slow_first, range(6), CPU)) == [(item, 1) for item in range(6)]
    assert threading.get_ident() not in seen and len(seen) == 2
    assert torch.get_num_threads() == 2


def test_one_after_another_where_one_thread_is_all_there_is() -> None:
    here = {threading.get_ident()}
    assert set(side_by_side(lambda _: threading.get_ident(), range(3), CPU, workers=1)) == here
    assert set(side_by_side(lambda _: threading.get_ident(), range(3), torch.device("meta"), workers=2)) == here


@pytest.mark.usefixtures("two_threads")
def test_a_fault_ends_it() -> None:
    called: list[int] = []

    def fault(item: int) -> int:
        called.append(item)
        if item == 1:
            raise OSError("no space left")
        time.sleep(0.01)
        return item

    with pytest.raises(OSError, match="no space left"):
        list(side_by_side(fault, range(100), CPU))
    assert len(called) < 20, "what waits is not begun"
    assert torch.get_num_threads() == 2


def test_a_cache_built_side_by_side_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_build, "BUILD_TOKENS", 64)  # many groups
    spec = CacheSpec(Target(tiny_model("llama")), conversations([*range(5, 40)]), (1, 2), torch.bfloat16)
    ranks, before = Ranks(Accelerator()), torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        build(spec, tmp_path / str(threads), ranks)
    torch.set_num_threads(before)
    (shard,) = range(len(spec.ranges))
    one, two = (shards.read(spec.path(tmp_path / threads, shard)) for threads in ("1", "2"))
    assert one.keys() == two.keys() == spec.storage.columns.keys()
    assert all(torch.equal(value, two[name]) for name, value in one.items())
