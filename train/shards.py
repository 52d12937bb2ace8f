"""One file of states: written whole or not at all, known by its hash, and not hashed again while nothing touched it.

The SHA-256 of all values stands in the file's own header. Hashing everything at every start would cost a pass over the
whole cache, so beside each file there is a note of the hash and of what the file system said when it was last found
right: size, inode, time of modification and time of change. Whatever writes to a file moves the last of these, which
no program can set back. So a file that matches its note is trusted at the price of one ``stat``; any other (changed,
copied, restored from a backup, without a note) is hashed in full, and gets a note when it is right.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from heads.beside import beside
from train.files import sync, write_whole

HASH = "sha256"


def write(path: Path, tensors: dict[str, Tensor], about: Mapping[str, str]) -> None:
    """Write beside its place, see it onto the disk, rename it there, and note that it is right.

    Raises:
        OSError: the disk refused; nothing of it is left then.
    """
    found = content_hash(tensors)
    try:
        with beside(path) as partial:
            save_file(tensors, partial, metadata={**about, HASH: found})
            sync(partial)
    except SafetensorError as error:  # how it tells of a full disk
        raise OSError(f"{path} could not be written ({error})") from error
    sync(path.parent)
    _remember(path, found)


def content_hash(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read(path: Path) -> dict[str, Tensor]:
    """Its tensors, memory-mapped: what is not touched is not read.

    Raises:
        OSError: it is missing or cut short.
    """
    try:
        with safe_open(path, "pt") as file:
            names = set(file.keys())
            return {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise OSError(f"{path} is cut short or no safetensors file ({error})") from error


def fault(path: Path, about: Mapping[str, str], columns: Mapping[str, tuple[int, torch.dtype]], rows: int) -> str:
    """What is wrong with a file that is there; empty when it is what was written.

    Args:
        about: as it was given to :func:`write`.
        columns: the tensors' widths and dtypes by name.
        rows: of each.
    """
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
        tensors = read(path)
    except (SafetensorError, OSError) as error:
        return f"cut short or no safetensors file: {error}"
    if {name: header.get(name) for name in about} != dict(about):
        return "of another cache"
    wanted = {name: ((rows, width), dtype) for name, (width, dtype) in columns.items()}
    if {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()} != wanted:
        return "other tensors than expected"
    if _remembered(path) == _state(path, header.get(HASH, "")):
        return ""
    if content_hash(tensors) != header.get(HASH):
        return "its values are not those that were written"
    _remember(path, header[HASH])
    return ""


def note(path: Path) -> Path:
    """Where it is noted that a file was found right."""
    return path.with_suffix(".json")


def remove(path: Path) -> None:
    """A file and its note."""
    note(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def _state(path: Path, found: str) -> dict[str, Any]:
    stat = path.stat()
    return {
        HASH: found,
        "bytes": stat.st_size,
        "inode": stat.st_ino,
        "modified": stat.st_mtime_ns,
        "changed": stat.st_ctime_ns,
    }


def _remember(path: Path, found: str) -> None:
    """Write the note; where that cannot be (a disk to be read only, another run at it too) a file is hashed again."""
    with contextlib.suppress(OSError):
        write_whole(note(path), json.dumps(_state(path, found)) + "\n")


def _remembered(path: Path) -> Any:
    try:
        return json.loads(note(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
