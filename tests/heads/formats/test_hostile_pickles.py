"""Pickles: read only when named, and only as tensors; nothing in them is run, and memory is bounded."""

from __future__ import annotations

import os
import pickle
import random
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from heads.formats import FormatError, export_heads, read_heads
from heads.formats.pickled import read_pickled
from tests.heads.formats.cases import MEDUSA
from tests.heads.formats.edit import WEIGHTS, little_memory, refused
from tests.heads.small import logits_of, small_heads, small_target


def pickled(path: Path, value: Any) -> Path:
    torch.save(value, path)
    return path


def test_a_pickle_is_read_only_when_it_is_named(tmp_path: Path) -> None:
    made = small_heads(target=small_target(layers=8), **MEDUSA)
    export_heads(made, "medusa", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "medusa_lm_head.safetensors")
    (tmp_path / "out" / "medusa_lm_head.safetensors").unlink()
    pickled(tmp_path / "out" / "medusa_lm_head.pt", tensors)
    refused(tmp_path / "out", r"only as a pickle \(medusa_lm_head\.pt\): name that file itself")
    back = read_heads(tmp_path / "out" / "medusa_lm_head.pt", small_target(layers=8)).heads
    assert torch.equal(logits_of(back), logits_of(made))


def test_an_eagle_pickle_with_its_config_beside_it(folder: Path) -> None:
    made = read_heads(folder, small_target(layers=8)).heads
    plain: Any = OrderedDict()
    for name, value in load_file(folder / WEIGHTS).items():
        plain[name] = torch.nn.Parameter(value) if value.is_floating_point() else value
    plain._metadata = {"": {"version": 1}}  # as a module's own state_dict has
    pickled(folder / "pytorch_model.bin", plain)
    (folder / WEIGHTS).unlink()
    back = read_heads(folder / "pytorch_model.bin", small_target(layers=8)).heads
    assert torch.equal(logits_of(back), logits_of(made))


class Evil:
    """What runs when it is unpickled."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.made = function, args

    def __reduce__(self) -> Any:
        return self.made


@pytest.mark.parametrize("how", ["archive", "plain", "protocol 4", "inside a table"])
def test_code_in_a_pickle_is_not_run(how: str, tmp_path: Path) -> None:
    marker, path = tmp_path / "was-run", tmp_path / "heads.pt"
    evil: Any = Evil(os.system, f"touch {marker}")
    if how == "plain":
        path.write_bytes(pickle.dumps(evil))
    elif how == "protocol 4":
        torch.save({"0.0.linear.weight": evil}, path, pickle_protocol=4)
    else:
        pickled(path, {"0.0.linear.weight": torch.ones(2), "x": evil} if how == "inside a table" else evil)
    refused(path, "nothing of it was run|is no archive that torch.save")
    assert not marker.exists()
    pickle.loads(pickle.dumps(evil))
    assert marker.exists(), "it would have run"


def rewritten(path: Path, change: Any, compression: int = zipfile.ZIP_STORED) -> Path:
    """The archive with another data.pkl."""
    with zipfile.ZipFile(path) as archive:
        members = {item.filename: archive.read(item) for item in archive.infolist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, change(content) if name.endswith("data.pkl") else content)
    return path


def test_pickles_that_ask_for_memory_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "heads.pt"
    refused(pickled(path, {"x": Evil(bytearray, 1 << 40)}), "asks for .*bytearray")
    refused(pickled(path, {"x": torch.zeros(1).expand(1 << 20, 1 << 20)}), "is empty, or more than was stored")
    refused(pickled(path, {"x": torch.zeros(0, 1 << 40)}), "is empty, or more than was stored")
    pickled(path, {"x": torch.zeros(1 << 22, dtype=torch.uint8)})
    refused(rewritten(path, bytes, zipfile.ZIP_DEFLATED), "has compressed members")
    # the storage claims more elements than its member holds: 1000 bytes there, 2^30 in the pickle
    pickled(path, {"x": torch.zeros(1000, dtype=torch.uint8)})
    claim = (1 << 30).to_bytes(4, "little")
    refused(rewritten(path, lambda content: content.replace(b"M\xe8\x03", b"J" + claim)), "cannot be read as tensors")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([torch.ones(2)], "must hold a table of tensors, not a list"),
        ({}, "must hold a table of tensors"),
        ({"state_dict": {"0.0.linear.weight": torch.ones(2)}}, "not a dict under 'state_dict'"),
        ({3: torch.ones(2)}, "must hold tensors by name"),
        ({"x": torch.ones(2, dtype=torch.complex64)}, "asks for torch ComplexFloatStorage"),
        ({"x": torch.ones(2, 2).to_sparse()}, "asks for .*_rebuild_sparse_tensor"),
        ({"x": torch.nn.Linear(2, 2)}, r"more than tensors \(instruction NEWOBJ\)"),
    ],
)
def test_a_pickle_of_something_else_is_refused(value: Any, message: str, tmp_path: Path) -> None:
    refused(pickled(tmp_path / "heads.bin", value), message)


def test_broken_archives_are_refused(tmp_path: Path) -> None:
    path = pickled(tmp_path / "heads.pt", {"x": torch.ones(50)})
    whole, rng = path.read_bytes(), random.Random(1)
    for keep in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:keep])
        refused(path, "is no archive|cannot be read")
    with little_memory():
        for _ in range(300):
            broken = bytearray(whole)
            for _ in range(3):
                broken[rng.randrange(len(broken))] = rng.randrange(256)
            path.write_bytes(broken)
            try:
                read_pickled(path)
            except FormatError as problem:
                assert len(str(problem)) < 1000
