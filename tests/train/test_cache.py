"""A cache's shards: told beforehand, whole or not there, verified, resumed after a kill, built by several at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import train.cache_build as building
from heads.target import Target
from tests.train.world import ROOT, conversations, tiny_target
from train import cache_spec, shards
from train.cache import CachedFeatures, open_or_build
from train.cache_spec import CacheSpec
from train.claims import Claims
from train.features import run_target
from train.ranks import Ranks

LENGTHS = [9, 5, 17, 12, 5, 30]
TAPS = (1, 2, 4)
TOKEN = 32 * 4 * 4 + 4 + 4  # float32: three taps and the last state of 32 values, arg-max, log-sum-exp


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of 20 tokens or more: conversations 0-2, 3-5."""
    monkeypatch.setattr(cache_spec, "SHARD_BYTES", (20 * TOKEN, 1 << 30))


def spec(target: Target | None = None, lengths: list[int] = LENGTHS) -> CacheSpec:
    return CacheSpec(target or tiny_target(torch.float32), conversations(lengths), TAPS, torch.float32)


def made(tmp_path: Path, one: CacheSpec | None = None) -> tuple[CacheSpec, Path]:
    one = one or spec()
    open_or_build(one, tmp_path, Ranks())
    return one, one.folder(tmp_path)


def same(ours: CachedFeatures, theirs: CachedFeatures) -> bool:
    return all(
        torch.equal(value, theirs.columns(index)[name])
        for index in range(len(ours.conversations))
        for name, value in ours.columns(index).items()
    )


def test_shards_and_size_are_known_beforehand(tmp_path: Path) -> None:
    one = spec()
    assert one.ranges == [(0, 3), (3, 6)]
    assert (one.tokens(0), one.tokens(1), one.bytes) == (31, 47, 78 * TOKEN)
    said: list[str] = []
    open_or_build(one, tmp_path, Ranks(), say=said.append)
    folder = one.folder(tmp_path)
    names = [f"states-{k:05d}-of-00002.safetensors" for k in range(2)]
    assert sorted(path.name for path in folder.glob("*.safetensors")) == names
    headers = [int.from_bytes((folder / name).read_bytes()[:8], "little") + 8 for name in names]
    assert sum((folder / name).stat().st_size for name in names) - sum(headers) == one.bytes
    assert said == [f"states: 78 tokens, 0.00 GiB in 2 shards, 2 of them (0.00 GiB) to be computed in {folder}"]
    open_or_build(one, tmp_path, Ranks(), say=said.append)
    assert said[-1].endswith(f"in 2 shards, all found in {folder}")


def test_shards_grow_with_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_spec, "SHARD_BYTES", (64 << 20, 1 << 30))
    one = spec()
    for size, expected in ((1 << 20, 64 << 20), (64 << 30, 256 << 20), (1 << 50, 1 << 30)):
        monkeypatch.setattr(CacheSpec, "bytes", size)
        assert one.shard_bytes == expected


def test_too_little_room_is_told_before_work_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 100})())
    monkeypatch.setattr(building, "run_target", lambda *_: pytest.fail("computed"))
    with pytest.raises(OSError, match=r"need .* GiB in .*data\.cache_folder"):
        open_or_build(spec(), tmp_path, Ranks())
    assert list(tmp_path.iterdir()) == []


def test_a_build_that_fails_keeps_whole_shards_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[Any] = []

    def failing(*arguments: Any) -> Any:
        passes.append(arguments[2].shape)
        if len(passes) == 4:
            raise OSError(28, "No space left on device")
        return run_target(*arguments)

    monkeypatch.setattr(building, "BUILD_TOKENS", 20)
    with monkeypatch.context() as patch:
        patch.setattr(building, "run_target", failing)
        with pytest.raises(OSError, match="No space left"):
            open_or_build(spec(), tmp_path, Ranks())
    one = spec()
    folder = one.folder(tmp_path)
    first = one.path(folder, 0)
    assert {path.name for path in folder.iterdir()} == {first.name, shards.note(first).name, "key.json", "claims"}
    written = first.stat().st_mtime_ns
    resumed = open_or_build(one, tmp_path, Ranks())
    assert first.stat().st_mtime_ns == written
    assert same(resumed, open_or_build(spec(), tmp_path / "elsewhere", Ranks()))


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-4]), "cut short or no safetensors file"),
        (lambda path: path.write_bytes(b""), "cut short or no safetensors file"),
        (lambda path: flip(path, -100), "its values are not those that were written"),
        (lambda path: restored(path, -100), "its values are not those that were written"),
        (
            lambda path: path.write_bytes(path.with_name(path.name.replace("00001-of", "00000-of")).read_bytes()),
            "of an",
        ),
    ],
    ids=["cut", "empty", "one bit", "one bit and the old time", "another shard"],
)
def test_a_broken_shard_is_named_and_computed_again(tmp_path: Path, damage: Any, what: str) -> None:
    one, folder = made(tmp_path)
    right = {name: value.clone() for name, value in shards.read(one.path(folder, 1)).items()}
    broken, good = one.path(folder, 1), one.path(folder, 0)
    written = good.stat().st_mtime_ns
    damage(broken)
    said: list[str] = []
    open_or_build(one, tmp_path, Ranks(), say=said.append)
    assert said[0].startswith(f"states: {broken} is damaged ({what}") and said[0].endswith("it is computed again")
    assert "1 of them" in said[1]
    again = shards.read(broken)
    assert all(torch.equal(again[name], value) for name, value in right.items())
    assert good.stat().st_mtime_ns == written


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def restored(path: Path, at: int) -> None:
    """Changed by someone who sets the time of modification back."""
    before = path.stat()
    flip(path, at)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def test_what_nothing_touched_is_not_hashed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, folder = made(tmp_path)
    hashed: list[int] = []
    original = shards.content_hash

    def counting(tensors: Any) -> str:
        hashed.append(1)
        return original(tensors)

    monkeypatch.setattr(shards, "content_hash", counting)
    open_or_build(one, tmp_path, Ranks())
    assert hashed == []
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert building.check(one, copy, Ranks(), pytest.fail) == []  # a copy has other times and is hashed, once
    assert len(hashed) == 2
    assert building.check(one, copy, Ranks(), pytest.fail) == []
    assert len(hashed) == 2


def test_other_settings_have_other_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = spec()
    name = one.name
    assert json.loads((made(tmp_path)[1] / "key.json").read_text())["shard_bytes"] == 20 * TOKEN
    monkeypatch.setattr(cache_spec, "SHARD_BYTES", (30 * TOKEN, 1 << 30))
    assert spec().name != name


# several processes


def test_each_process_begins_with_its_own_share() -> None:
    one, two = Ranks(), Ranks()
    two.index, two.count, one.count = 1, 2, 2
    assert building._order([0, 1, 2, 3, 4], one) == [0, 2, 4, 1, 3]
    assert building._order([0, 1, 2, 3, 4], two) == [1, 3, 0, 2, 4]


OTHER = """
import sys, time
from pathlib import Path
import torch
import train.cache_build as building
from train import cache_spec
from train.cache import open_or_build
from train.ranks import Ranks
from tests.train.test_cache import TOKEN, spec

cache_spec.SHARD_BYTES = 20 * TOKEN, 1 << 30
torch.set_num_threads(1)
real = building.run_target

def slow(*arguments):
    print("pass", flush=True)
    time.sleep(0.2)
    return real(*arguments)

building.run_target = slow
open_or_build(spec(lengths=[20] * 12), Path(sys.argv[1]), Ranks())
"""


def test_two_builds_at_once_share_and_one_that_is_killed_leaves_nothing_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve shards, two runs; one is killed while it computes. The other finishes, and does nothing twice."""
    one = spec(lengths=[20] * 12)
    assert len(one.ranges) == 12
    folder = one.folder(tmp_path)
    passes = []

    def counted(*arguments: Any) -> Any:
        passes.append(1)
        if len(passes) == 3:
            other.send_signal(signal.SIGKILL)
        return run_target(*arguments)

    monkeypatch.setattr(building, "run_target", counted)
    monkeypatch.setattr(building, "POLL_SECONDS", 0.05)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path)], env=environ, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None and other.stdout.readline() and other.stdout.readline()  # in its second shard
    cached = open_or_build(one, tmp_path, Ranks())
    rest = other.stdout.read()
    assert other.wait() == -signal.SIGKILL
    assert 12 <= 2 + rest.count("pass") + len(passes) <= 13  # at most the one that was being computed
    assert sorted(path.name for path in folder.iterdir() if path.suffix != ".json") == [
        "claims",
        *sorted(one.path(folder, shard).name for shard in range(12)),
    ]
    assert same(cached, open_or_build(one, tmp_path / "alone", Ranks()))


def test_a_claim_is_one_processes_alone(tmp_path: Path) -> None:
    ask = "import sys; from pathlib import Path; from train.claims import Claims\n"
    ask += "with Claims(Path(sys.argv[1])) as c, c.take(3) as a, c.take(4) as b: print(a, b)"
    with Claims(tmp_path / "claims") as claims, claims.take(3) as got:
        assert got
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", ask, str(tmp_path / "claims")]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["False", "True"]


def test_reading_is_by_conversation(tmp_path: Path) -> None:
    one, folder = made(tmp_path)
    cached = CachedFeatures(one, folder)
    for index, length in enumerate(LENGTHS):
        assert {len(values) for values in cached.columns(index).values()} == {length}
    ids = one.conversations.ids(4)[None]
    fresh = run_target(one.target, TAPS, ids, one.conversations.loss_mask(4)[None], one.storage)
    torch.testing.assert_close(cached.columns(4)["hidden"], fresh["hidden"][0], rtol=1e-5, atol=1e-6)
    one.path(folder, 1).unlink()
    with pytest.raises(OSError, match="00001-of-00002"):
        CachedFeatures(one, folder).columns(5)
    assert np.array_equal(cached.columns(5)["top"].numpy().shape, (30, 1))  # mapped before
