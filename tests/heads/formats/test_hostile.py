"""Hostile and broken checkpoints: one clear error each, nothing run, and no more memory than the file is long."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from heads.formats import FormatError, read_heads
from heads.formats.checkpoint import HEADER_BYTES, read_header
from heads.formats.folder import open_checkpoint
from tests.heads.formats.edit import WEIGHTS, little_memory, refused
from tests.heads.small import logits_of, small_heads, small_target


def crafted(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A safetensors file with such a header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def tensor(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


# safetensors


@pytest.mark.parametrize("keep", [0, 4, 8, 9, 500, -1])
def test_a_file_cut_short_is_refused(keep: int, folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:keep])
    refused(folder, "not a whole safetensors file|broken header")


def test_a_file_with_more_behind_it_is_refused(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes() + b"#!/bin/sh")
    refused(folder, "its tensors take .* bytes and the file has")


HEADERS: dict[str, tuple[Any, str]] = {
    "no JSON": (b"{" * 50, "is not valid JSON"),
    "no text": (b"\xff\xfe" * 20, "is not valid JSON"),
    "nested": (b"[" * 100_000, "is not valid JSON"),
    "long number": (b'{"a":' + b"9" * 5000 + b"}", "is not valid JSON"),
    "a list": ([1, 2], "must hold a JSON object, not a list"),
    "twice": (b'{"a":1,"a":2}', "a key stands twice"),
    "no tensor": ({"a": 3}, "must have dtype, shape and data_offsets"),
    "half a tensor": ({"a": {"dtype": "F32"}}, "must have dtype, shape and data_offsets"),
    "huge": ({"a": tensor((1 << 40, 1 << 20))}, "cannot lie at"),
    "wrapping": ({"a": tensor((1 << 32, 1 << 32))}, "cannot lie at"),
    "empty but wide": ({"a": tensor((1 << 40, 0), (0, 0))}, "is no short list of positive integers"),
    "negative": ({"a": tensor((-2, -1))}, "is no short list of positive integers"),
    "fraction": ({"a": tensor((2.0,))}, "is no short list of positive integers"),
    "truth": ({"a": tensor((True, 2))}, "is no short list of positive integers"),
    "deep": ({"a": tensor((1,) * 64 + (2,))}, "is no short list of positive integers"),
    "text": ({"a": tensor("22")}, "is no short list of positive integers"),
    "offsets text": ({"a": tensor(offsets="08")}, "are no two integers"),
    "offsets one": ({"a": tensor(offsets=[8])}, "are no two integers"),
    "backwards": ({"a": tensor(offsets=[8, 0])}, "cannot lie at"),
    "before": ({"a": tensor(offsets=[-8, 0])}, "cannot lie at"),
    "beyond": ({"a": tensor(offsets=[8, 16])}, "leave a gap at byte 8"),
    "overlap": ({"a": tensor(), "b": tensor()}, "overlap at byte 0"),
    "partly": ({"a": tensor(), "b": tensor(offsets=[4, 12])}, "overlap at byte 4"),
    "short": ({"a": tensor((1,), [0, 4])}, "its tensors take 4 bytes and the file has 8"),
    "dtype": ({"a": tensor(dtype="F8_E4M3")}, "dtype 'F8_E4M3' is not one of"),
    "no dtype": ({"a": tensor(dtype=["F32"])}, "is not one of"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_lies_is_refused_before_anything_is_read(name: str, tmp_path: Path) -> None:
    header, message = HEADERS[name]
    refused(crafted(tmp_path / WEIGHTS, header, b"\0" * 8), message)


def test_a_header_longer_than_any_is_not_read(tmp_path: Path) -> None:
    path = crafted(tmp_path / WEIGHTS, {}, length=1 << 62)
    refused(path, "not a whole safetensors file")
    crafted(path, {}, length=HEADER_BYTES + 1)
    os.truncate(path, 4 * HEADER_BYTES)  # a hole: as long as it says, and takes no disk
    refused(path, "a header of .* more than 16 MiB")


def test_names_of_tensors_are_shown_cut_and_harmless(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    names = ["../../etc/passwd", "\x1b[2J\n", "x" * 5000, *(f"extra{i}" for i in range(50))]
    save_file(tensors | {name: torch.ones(1) for name in names}, folder / WEIGHTS)
    refused(folder, r"unexpected .*\.\./\.\./etc/passwd.* more")


def test_flipped_bytes_in_a_header_never_get_through_as_anything_else(tmp_path: Path) -> None:
    """Either the reader says what is wrong, or what it reads fits the file."""
    path = tmp_path / WEIGHTS
    save_file({"fc.weight": torch.ones(3, 4), "norm.weight": torch.ones(3), "d2t": torch.arange(5)}, path)
    whole = path.read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    rng = random.Random(0)
    outcomes = {True: 0, False: 0}
    with little_memory():
        for _ in range(600):
            broken = bytearray(whole)
            for _ in range(rng.randint(1, 3)):
                broken[rng.randrange(length)] = rng.choice(b'0123456789{}[],:"FBI\x00\xff')
            path.write_bytes(broken)
            try:
                entries = read_header(path)
            except FormatError:
                outcomes[False] += 1
            else:
                sizes = [torch.Size(entry.shape).numel() * entry.dtype.itemsize for entry in entries.values()]
                assert sum(sizes) == len(whole) - 8 - int.from_bytes(broken[:8], "little")
                outcomes[True] += 1
    assert min(outcomes.values()) > 20


def test_flipped_settings_are_refused_or_read_but_never_a_crash(folder: Path) -> None:
    """Any value under any key: a ValueError with one message, or heads that were built on it."""
    stored = json.loads((folder / "config.json").read_text())
    values: list[Any] = [None, True, -1, 3, 1 << 80, 1e308, "\n" * 99, [1], {"rope_type": []}]
    extra = ["eagle_config", "eagle_aux_hidden_state_layer_ids", "fc_norm", "speculators_model_type", "head_dim"]
    target, seen = small_target(layers=8), 0
    with little_memory():
        for key in [*stored, *extra]:
            for value in values:
                (folder / "config.json").write_text(json.dumps(stored | {key: value}))
                try:
                    read_heads(folder, target)
                except ValueError as problem:
                    seen += 1
                    assert len(str(problem)) < 1000
    assert seen > 50


# folders


@pytest.mark.parametrize(
    "place", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "x.bin", ".x"]
)
def test_an_index_that_leads_out_of_its_folder_is_refused(place: str, folder: Path) -> None:
    (folder / WEIGHTS).rename(folder.parent / "secret.safetensors")
    names = load_file(folder.parent / "secret.safetensors").keys()
    index = {"weight_map": dict.fromkeys(names, place)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "names what is no safetensors file of its own folder")


def shard(folder: Path) -> dict[str, str]:
    """Split the folder's weights over two files and an index."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    files = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return files


def test_shards_are_read_as_one(folder: Path) -> None:
    whole = read_heads(folder, small_target(layers=8)).heads
    shard(folder)
    assert torch.equal(logits_of(read_heads(folder, small_target(layers=8)).heads), logits_of(whole))


def test_an_index_that_disagrees_with_its_files_is_refused(folder: Path) -> None:
    files = shard(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files | {"ghost": files["fc.weight"]}}))
    refused(folder, "disagree about ghost")
    index.write_text(json.dumps({"weight_map": {name: file for name, file in files.items() if name != "fc.weight"}}))
    refused(folder, r"disagree about fc\.weight")
    index.write_text(json.dumps({"weight_map": files}))
    first, second = sorted(set(files.values()))
    save_file(load_file(folder / first) | {"norm.weight": torch.ones(32)}, folder / first)
    save_file(load_file(folder / second) | {"norm.weight": torch.ones(32)}, folder / second)
    refused(folder, r"tensors in two files: norm\.weight")
    (folder / second).unlink()
    refused(folder, "is missing, or no plain file")
    for broken in ("[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}'):
        index.write_text(broken)
        refused(folder, "must map tensors to files|must hold a JSON object")


def test_a_pipe_or_a_huge_config_is_not_waited_for(folder: Path) -> None:
    (folder / "config.json").unlink()
    with (folder / "config.json").open("wb") as file:
        file.truncate(1 << 30)
    refused(folder, "larger than 16 MiB")
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)
    refused(folder, "has none of model.safetensors")
    refused(folder / WEIGHTS, "is missing, or no plain file")


def test_places_without_a_checkpoint_say_so(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "there is no .*nowhere")
    refused(tmp_path, "has none of model.safetensors.* holds nothing")
    (tmp_path / "weights.gguf").write_bytes(b"")
    refused(tmp_path / "weights.gguf", "is none of .safetensors")
    small_heads(target=small_target(), kind="medusa").save_pretrained(tmp_path)
    refused(tmp_path, "holds heads of this project: there is nothing to import")


def test_whole_files_pass_all_this(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert checkpoint.entries.keys() == load_file(folder / WEIGHTS).keys()
    for name, value in load_file(folder / WEIGHTS).items():
        assert checkpoint.entries[name].shape == tuple(value.shape) and torch.equal(checkpoint.load(name), value)
