"""Someone else's safetensors, read with mistrust: every header is checked against its file before anything is loaded.

What can be wrong is found in the header alone (a file of ``8 + header + data`` bytes whose tensors cover the data
exactly), so that memory is bounded by the size of the files, whatever shapes they declare.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from heads.formats.format import FormatError, listed

HEADER_BYTES = 16 << 20  # draft heads have dozens of tensors; a header of this size names a hundred thousand
JSON_BYTES = 16 << 20
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
SHARD = re.compile(r"[\w-][\w.-]*\.safetensors", re.ASCII)  # a plain name in the same folder


@dataclass(frozen=True)
class Entry:
    """A tensor as its header declares it; every dimension is at least 1 and the bytes are there."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """Weights and configuration of another project.

    Attributes:
        path: what the user named, for messages.
        config: its config.json, empty when there is none.
        files: of the weights.
        entries: every tensor by name.
        load: the values of one.
    """

    path: Path
    entries: dict[str, Entry]
    load: Callable[[str], Tensor]
    config: dict[str, Any] = field(default_factory=dict)
    files: tuple[Path, ...] = ()

    def shape(self, name: str, dims: int) -> tuple[int, ...]:
        """Shape of a tensor that must be there.

        Raises:
            FormatError: it is missing or has another number of dimensions.
        """
        if name not in self.entries:
            raise FormatError(f"{self.path} lacks the tensor {name} (it holds {listed(self.entries)})")
        shape = self.entries[name].shape
        if len(shape) != dims:
            raise FormatError(f"{self.path}: {name} has the shape {shape} where {dims} dimensions are expected")
        return shape


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size.

    Raises:
        FormatError: too large, or no JSON object.
    """
    if path.stat().st_size > JSON_BYTES:
        raise FormatError(f"{path} is larger than {JSON_BYTES >> 20} MiB: it is no configuration")
    return _object(path.read_bytes(), str(path))


def _object(text: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as problem:
        raise FormatError(f"{where} is not valid JSON ({str(problem)[:200]})") from None
    if not isinstance(found, dict):
        raise FormatError(f"{where} must hold a JSON object, not a {type(found).__name__}")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors that a safetensors file holds, without reading any.

    Raises:
        FormatError: the file is cut short or too long, or a tensor lies outside it, over another, or is not of the
            size that its shape and dtype say.
    """
    if not path.is_file():
        raise FormatError(f"{path} is missing, or no plain file")
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > size - 8:
            raise FormatError(f"{path} is not a whole safetensors file ({size} bytes): copy it again")
        if length > HEADER_BYTES:
            raise FormatError(f"{path} has a header of {length} bytes, more than {HEADER_BYTES >> 20} MiB: refused")
        header = _object(file.read(length), f"the header of {path}")
    header.pop("__metadata__", None)
    try:
        found = {name: _entry(value) for name, value in header.items()}
        _cover([value["data_offsets"] for value in header.values()], size - 8 - length)
    except ValueError as problem:
        raise FormatError(f"{path} has a broken header: {problem}") from None
    return found


def _entry(value: Any) -> Entry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ValueError("a tensor must have dtype, shape and data_offsets")
    name, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"the dtype {str(name)[:20]!r} is not one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(type(part) is int and part > 0 for part in shape) or len(shape) > 8:
        raise ValueError(f"the shape {str(shape)[:80]} is no short list of positive integers")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(part) is int for part in offsets):
        raise ValueError(f"the offsets {str(offsets)[:80]} are no two integers")
    wanted = math.prod(shape) * DTYPES[name].itemsize
    if offsets[0] < 0 or offsets[1] - offsets[0] != wanted:
        raise ValueError(f"a {name} tensor of shape {str(shape)[:80]} cannot lie at {str(offsets)[:80]}")
    return Entry(DTYPES[name], tuple(shape))


def _cover(spans: list[list[int]], size: int) -> None:
    end = 0
    for start, stop in sorted(spans):
        if start != end:
            raise ValueError(f"tensors {'overlap' if start < end else 'leave a gap'} at byte {start}")
        end = stop
    if end != size:
        raise ValueError(f"its tensors take {end} bytes and the file has {size} for them")


def read_files(paths: list[Path], where: Path) -> Checkpoint:
    """A checkpoint over one or several safetensors files.

    Raises:
        FormatError: a header is broken, or a tensor stands in two files.
    """
    place: dict[str, Path] = {}
    entries: dict[str, Entry] = {}
    for path in paths:
        header = read_header(path)
        if twice := entries.keys() & header.keys():
            raise FormatError(f"{where} holds tensors in two files: {listed(twice)}")
        entries |= header
        place |= dict.fromkeys(header, path)

    def load(name: str) -> Tensor:
        try:
            with safe_open(place[name], "pt") as file:
                return file.get_tensor(name)
        except SafetensorError as problem:
            raise FormatError(f"{place[name]} cannot be read ({problem})") from None

    return Checkpoint(where, entries, load, files=tuple(paths))


def read_index(path: Path) -> Checkpoint:
    """A checkpoint over the shards that an index file names.

    Raises:
        FormatError: the index names a file outside its folder, or other tensors than the shards hold.
    """
    placed = read_json(path).get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(value, str) for value in placed.values()):
        raise FormatError(f"{path} must map tensors to files in weight_map")
    shards = set(placed.values())
    if outside := [name for name in shards if not SHARD.fullmatch(name)]:
        raise FormatError(f"{path} names what is no safetensors file of its own folder: {listed(outside)}")
    found = read_files([path.parent / name for name in sorted(shards)], path)
    if wrong := found.entries.keys() ^ placed.keys():
        raise FormatError(f"{path} and its files disagree about {listed(wrong)}")
    return found
