"""A cache of more taps is read where one of fewer is asked for: the same bits, and nothing is computed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train.cache_build as building
from tests.train.test_cache import flip, same, spec
from train.cache import CachedFeatures, open_or_build
from train.cache_spec import CacheSpec
from train.cache_wider import wider
from train.ranks import Ranks

LAST = 4  # of the tiny target, behind its final norm


def opened(one: CacheSpec, root: Path, said: list[str] | None = None) -> CachedFeatures:
    return open_or_build(one, root, Ranks(), say=(said if said is not None else []).append)


def of(taps: tuple[int, ...], dtype: torch.dtype = torch.float32) -> CacheSpec:
    return replace(spec(), taps=taps, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("taps", [(1,), (2, 1), (3, 1, 2), (LAST,), (LAST, 2)])
def test_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taps: tuple[int, ...], dtype: torch.dtype
) -> None:
    asked = of(taps, dtype)
    alone = opened(asked, tmp_path / "alone")
    opened(of((1, 2, 3), dtype), tmp_path / "shared")
    if dtype == torch.float8_e4m3fn and LAST in taps:
        assert wider(asked, tmp_path / "shared") is None  # the last state is never kept in eight bits
        return
    monkeypatch.setattr(building, "run_target", lambda *_: pytest.fail("computed"))
    said: list[str] = []
    read = opened(asked, tmp_path / "shared", said)
    assert said[0] == f"states at taps {list(taps)}: read from those at taps [1, 2, 3]"
    assert same(alone, read)
    one, other = alone.batch([2, 0, 5]), read.batch([2, 0, 5])
    assert torch.equal(one.taps, other.taps) and torch.equal(one.hidden, other.hidden)
    assert not asked.folder(tmp_path / "shared").exists()


def test_the_smallest_whole_one_is_read(tmp_path: Path) -> None:
    for taps in ((1, 2, 3), (0, 1, 2, 3)):
        opened(of(taps), tmp_path)
    assert wider(of((2, 3)), tmp_path) == (1, 2, 3)
    assert wider(of((0, 3)), tmp_path) == (0, 1, 2, 3)
    small = of((1, 2, 3))
    small.path(small.folder(tmp_path), 0).unlink()
    assert wider(of((2, 3)), tmp_path) == (0, 1, 2, 3)


def test_what_cannot_serve(tmp_path: Path) -> None:
    opened(of((1, 2)), tmp_path)
    assert wider(of((1, 3)), tmp_path) is None  # a tap that is not there
    assert wider(of((1,), torch.bfloat16), tmp_path) is None  # another dtype
    assert wider(replace(spec(lengths=[9, 5, 17]), taps=(1,)), tmp_path) is None  # other conversations
    assert wider(of((1,)), tmp_path / "nowhere") is None
    assert wider(of((1, 2)), tmp_path) is None  # that is the cache itself
    assert wider(of((1,)), tmp_path) == (1, 2)
    of((1,)).folder(tmp_path).mkdir()
    assert wider(of((1,)), tmp_path) is None  # its own was begun: it goes on


@pytest.mark.parametrize(
    "key", ["", "{", "[]", '{"taps": 3}', '{"taps": [1.5]}', '{"taps": []}', '{"taps": [1, 2, 3]}']
)
def test_a_key_that_is_broken_or_of_something_else_serves_nothing(tmp_path: Path, key: str) -> None:
    opened(of((1, 2)), tmp_path)
    folder = of((1, 2)).folder(tmp_path)
    assert json.loads((folder / "key.json").read_text())["taps"] == [1, 2]
    (folder / "key.json").write_text(key)
    assert wider(of((1,)), tmp_path) is None


def test_a_broken_shard_of_it_is_computed_again(tmp_path: Path) -> None:
    alone = opened(of((2,)), tmp_path / "alone")
    opened(of((1, 2)), tmp_path / "shared")
    broken = of((1, 2))
    flip(broken.path(broken.folder(tmp_path / "shared"), 0), -100)
    said: list[str] = []
    assert same(alone, opened(of((2,)), tmp_path / "shared", said))
    assert any("damaged" in line for line in said)
