"""A heads folder may come from anybody: whatever its two files say, there is one error, and memory stays bounded."""

from __future__ import annotations

import json
import os
import random
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from heads.base import DraftHeads
from heads.config import ConfigError
from heads.layout import INDEX, INDEX_BYTES, target_files
from heads.store import CONFIG, CONFIG_BYTES, WEIGHTS, HeadsFileError, read_tensors
from tests.heads.small import small_heads, small_target

ODD: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    3,
    1 << 20,
    1 << 60,
    1e308,
    float("nan"),
    "x",
    "\n" * 99,
    [1],
    [],
    {},
    {"a": 1},
]


def load(folder: Path) -> DraftHeads:
    return DraftHeads.from_pretrained(folder, small_target())


@contextmanager
def little_memory(megabytes: int = 64) -> Iterator[None]:
    """The process's peak grows by less than so much."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < megabytes << 10


def test_odd_settings_are_refused_or_change_nothing_that_is_loaded(saved: tuple[DraftHeads, Path]) -> None:
    """Any value under any key, also inside the options and the target's record: an error that says what, or heads."""
    made, folder = saved
    stored = json.loads((folder / CONFIG).read_text())
    places: list[tuple[str, ...]] = [(key,) for key in stored]
    places += [("options", key) for key in stored["options"]] + [("target", key) for key in stored["target"]]
    refused = 0
    load(folder)
    with little_memory():
        for place in places:
            for value in ODD:
                changed = json.loads(json.dumps(stored))
                inner = changed[place[0]] if len(place) == 2 else changed
                inner[place[-1]] = value
                (folder / CONFIG).write_text(json.dumps(changed))
                try:
                    back = load(folder)
                except ValueError as problem:
                    refused += 1
                    assert str(problem).isprintable() and len(str(problem)) < 1500, place
                else:
                    names = back.state_dict()
                    assert all(torch.equal(names[name], kept) for name, kept in made.state_dict().items()), place
    assert refused > len(places) * len(ODD) / 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lookahead": 1 << 30}, "a look-ahead of 1073741824 is beyond any"),
        ({"options": {"layers": 1 << 20}}, "layers are beyond any"),
        ({"lora": {"rank": 1 << 40}}, "make no heads|does not hold the weights|lora.rank"),
        ({"lora": {"alpha": "x" * 9999}}, "lora.alpha must be above 0"),
        ({"lora": {"modules": ["a" * 9999]}}, "lora.modules"),
        ({"options": {"layers": "2"}}, "layers must be a whole number"),
        ({"options": {"own_output": 0}}, "own_output must be true or false"),
        ({"hidden_size": 1 << 40}, "hidden_size 1099511627776 there, 32 here"),
    ],
)
def test_sizes_that_no_heads_have_are_refused_at_once(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    small_heads("medusa", small_target(), layers=1).save_pretrained(tmp_path)
    stored = json.loads((tmp_path / CONFIG).read_text())
    inner = {"options": stored["options"] | options.get("options", {})}
    (tmp_path / CONFIG).write_text(json.dumps(stored | options | inner))
    with little_memory(), pytest.raises(ValueError, match=message) as problem:
        load(tmp_path)
    assert len(str(problem.value)) < 1500


def test_a_wide_layer_takes_no_memory_before_it_is_compared(tmp_path: Path) -> None:
    small_heads("eagle", small_target()).save_pretrained(tmp_path)
    stored = json.loads((tmp_path / CONFIG).read_text())
    stored["options"]["intermediate_size"] = 1 << 23  # 3 GB of weights
    (tmp_path / CONFIG).write_text(json.dumps(stored))
    with little_memory(), pytest.raises(HeadsFileError, match=r"gate_proj\.weight is \(64, 32\) where \(8388608, 32\)"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool])
def test_weights_that_are_no_floats_are_refused(dtype: torch.dtype, saved: tuple[DraftHeads, Path]) -> None:
    _, folder = saved
    tensors = load_file(folder / WEIGHTS)
    name = max(name for name in tensors if name != "target_ids")
    save_file(tensors | {name: tensors[name].to(dtype)}, folder / WEIGHTS)
    with pytest.raises(HeadsFileError, match=rf"stores {name} as {str(dtype).removeprefix('torch.')}: floats are"):
        load(folder)


def test_ids_that_are_floats_are_refused(tmp_path: Path) -> None:
    small_heads("eagle", small_target(), draft_vocab=20).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    save_file(tensors | {"target_ids": tensors["target_ids"].float()}, tmp_path / WEIGHTS)
    with pytest.raises(HeadsFileError, match="stores target_ids as float32"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("shape", "offsets", "dtype"),
    [((1 << 40, 1 << 20), (0, 8), "F32"), ((2,), (0, 1 << 40), "F32"), ((2,), (-8, 0), "F32"), ((2,), (0, 8), "PKL")],
)
def test_a_header_that_lies_is_refused(shape: Any, offsets: Any, dtype: str, tmp_path: Path) -> None:
    small_heads("medusa", small_target()).save_pretrained(tmp_path)
    header = json.dumps({"../../x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()
    (tmp_path / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    with little_memory(), pytest.raises(HeadsFileError, match="not a whole safetensors file"):
        load(tmp_path)


def test_flipped_and_cut_files_are_refused_or_hold_what_was_saved(tmp_path: Path) -> None:
    """Hundreds of broken copies: one error each, or the very tensors; and no more memory than the file is long."""
    made = small_heads("eagle", small_target(), draft_vocab=20)
    made.save_pretrained(tmp_path)
    whole, expected = (tmp_path / WEIGHTS).read_bytes(), made.state_dict()
    header, rng = 8 + int.from_bytes(whole[:8], "little"), random.Random(0)
    outcomes = {True: 0, False: 0}
    with little_memory():
        for _ in range(500):
            broken = bytearray(whole)
            for _ in range(rng.randint(1, 3)):
                broken[rng.randrange(header)] = rng.choice(b'0123456789{}[],:"FBI\x00\xff ')
            (tmp_path / WEIGHTS).write_bytes(broken if rng.random() < 0.8 else broken[: rng.randrange(len(broken))])
            try:
                found = read_tensors(tmp_path / WEIGHTS, expected)
            except HeadsFileError as problem:
                outcomes[False] += 1
                assert len(str(problem)) < 3000
            else:
                outcomes[True] += 1
                assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert outcomes[False] > 300 and outcomes[True] > 0


def test_a_pickle_under_our_name_is_not_opened(tmp_path: Path) -> None:
    small_heads("medusa", small_target()).save_pretrained(tmp_path)
    torch.save({"blocks.0.0.linear.weight": torch.ones(2)}, tmp_path / WEIGHTS)
    with pytest.raises(HeadsFileError, match="not a whole safetensors file"):
        load(tmp_path)


@pytest.mark.parametrize("content", ["[" * 200_000, '{"a":' * 100_000, "9" * 5000])
def test_json_that_is_deep_or_long_is_one_error(content: str, tmp_path: Path) -> None:
    small_heads("medusa", small_target()).save_pretrained(tmp_path)
    (tmp_path / CONFIG).write_text(content)
    with pytest.raises(HeadsFileError, match="not valid JSON") as problem:
        load(tmp_path)
    assert len(str(problem.value)) < 1000


def test_a_huge_configuration_is_not_read(tmp_path: Path) -> None:
    small_heads("medusa", small_target()).save_pretrained(tmp_path)
    os.truncate(tmp_path / CONFIG, CONFIG_BYTES + 1)
    with little_memory(), pytest.raises(HeadsFileError, match="larger than 16 MiB"):
        load(tmp_path)


@pytest.mark.parametrize("place", ["../secret.safetensors", "/etc/passwd", "sub/model-1-of-1.safetensors", ".env"])
def test_an_index_cannot_make_a_push_reach_out_of_its_folder(place: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": place}}))
    with pytest.raises(ValueError, match="names what is no safetensors file of its folder"):
        target_files(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [("[1]", "must hold a JSON object, not a list"), ("[" * 200_000, "is not valid JSON"), ("{", "is not valid JSON")],
)
def test_an_index_that_is_none_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(ValueError, match=message):
        target_files(tmp_path)
    os.truncate(tmp_path / INDEX, INDEX_BYTES + 1)
    with little_memory(), pytest.raises(ValueError, match="larger than 64 MiB"):
        target_files(tmp_path)


# not hostile, only unlike: who may read what was saved


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_files_are_as_readable_as_the_umask_says(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        small_heads("medusa", small_target()).save_pretrained(tmp_path / "heads")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "heads").iterdir()}
    assert modes == {CONFIG: 0o666 & ~umask, WEIGHTS: 0o666 & ~umask}


def test_an_unknown_kind_is_no_crash(tmp_path: Path) -> None:
    small_heads("medusa", small_target()).save_pretrained(tmp_path)
    stored = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(stored | {"kind": "__class__"}))
    with pytest.raises(ConfigError, match="unknown kind of heads '__class__'"):
        load(tmp_path)
