"""Old ``.pt`` and ``.bin`` checkpoints: pickles, read only when named, and only as a flat table of tensors.

``torch.load(weights_only=True)`` runs no code, but a file may still ask it for more memory than there is. So the
archive and the pickle's instructions are looked through first: stored members only, no instruction beyond those that
rebuild tensors, and no storage that is larger than its member.
"""

from __future__ import annotations

import math
import pickletools
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from heads.formats.checkpoint import DTYPES, Checkpoint, Entry
from heads.formats.format import FormatError, listed

PICKLE_BYTES = 16 << 20
STORAGES = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
GLOBALS = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    *(f"torch {name}Storage" for name in STORAGES),
}
# instructions that could call or make something by another way than a plain global, or grow without bound
REFUSED = {"STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "PERSID"}


def read_pickled(path: Path) -> Checkpoint:
    """A flat ``{name: tensor}`` that ``torch.save`` wrote.

    Raises:
        FormatError: it is something else, or asks for anything that tensors do not need.
    """
    if not path.is_file():
        raise FormatError(f"{path} is missing, or no plain file")
    try:
        _look_through(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except FormatError:
        raise
    except Exception as problem:  # the unpickler raises whatever a broken file leads it into
        what = " ".join(str(problem).split())[:200] or type(problem).__name__
        raise FormatError(f"{path} cannot be read as tensors alone ({what})") from None
    tensors = _tensors(path, found)
    entries = {name: Entry(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    return Checkpoint(path, entries, tensors.__getitem__, files=(path,))


def _look_through(path: Path) -> None:
    if not zipfile.is_zipfile(path):
        raise FormatError(
            f"{path} is no archive that torch.save of 1.6 or later writes: save it again with safetensors"
        )
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if any(item.compress_type != zipfile.ZIP_STORED for item in members):
            raise FormatError(f"{path} has compressed members, which torch.save does not write: refused")
        if sum(item.file_size for item in members) > size:
            raise FormatError(f"{path} declares more bytes than it has: refused")
        pickles = [item for item in members if PurePosixPath(item.filename).name == "data.pkl"]
        if len(pickles) != 1 or pickles[0].file_size > PICKLE_BYTES:
            raise FormatError(f"{path} must hold one data.pkl of at most {PICKLE_BYTES >> 20} MiB")
        wanted = set()
        for code, value, _ in pickletools.genops(archive.read(pickles[0])):
            if code.name in REFUSED:
                raise FormatError(f"{path} holds more than tensors (instruction {code.name}): nothing of it was run")
            if code.name == "GLOBAL":
                wanted.add(str(value))
    if beyond := wanted - GLOBALS:
        raise FormatError(f"{path} asks for {listed(beyond)}, which tensors do not need: nothing of it was run")


def _tensors(path: Path, found: Any) -> dict[str, Tensor]:
    """The table, if each tensor is dense and lies within what was read for it."""
    if not isinstance(found, dict) or not found:
        raise FormatError(f"{path} must hold a table of tensors, not a {type(found).__name__}")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise FormatError(
                f"{path} must hold tensors by name, not a {type(value).__name__} under {str(name)[:80]!r}"
            )
        if value.dtype not in DTYPES.values():
            raise FormatError(f"{path}: {listed([name])} is stored as {value.dtype}, which is not supported")
        if 0 in value.shape or math.prod(value.shape) * value.itemsize > value.untyped_storage().nbytes():
            raise FormatError(
                f"{path}: {listed([name])} of shape {tuple(value.shape)} is empty, or more than was stored"
            )
    return {name: value.contiguous() for name, value in found.items()}
