"""What tests do to other projects' folders: make one, change it, and be refused with bounded memory."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from heads.base import DraftHeads
from heads.formats import FormatError, export_heads, read_heads
from tests.heads.formats.cases import BLOCK, MEDUSA, USUAL
from tests.heads.small import small_heads, small_target

WEIGHTS = "model.safetensors"


def eagle(folder: Path, to: str = "eagle3", **options: Any) -> DraftHeads:
    """EAGLE-3 heads with a reduced vocabulary, exported into ``folder``."""
    made = small_heads(target=small_target(layers=8), **USUAL | {"draft_vocab": 20} | options)
    export_heads(made, to, folder)
    return made


def medusa(folder: Path, engine: str | None = None, **options: Any) -> DraftHeads:
    made = small_heads(target=small_target(layers=8), **MEDUSA | options)
    export_heads(made, "medusa", folder, engine=engine)
    return made


def read(folder: Path, **options: Any) -> DraftHeads:
    return read_heads(folder, small_target(layers=8), **options).heads


def reconfigure(folder: Path, drop: tuple[str, ...] = (), **values: Any) -> None:
    path = folder / "config.json"
    stored = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in stored.items() if key not in drop}))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def dflash(folder: Path) -> DraftHeads:
    made = small_heads(target=small_target(layers=8), **BLOCK, taps=(2, 4, 5))
    export_heads(made, "dflash", folder)
    return made


@contextmanager
def little_memory(megabytes: int = 48) -> Iterator[None]:
    """The process's peak grows by less than so much."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < megabytes << 10


def refused(path: Path, message: str, **options: Any) -> None:
    """Not read, with one printable message of bounded length and little memory."""
    small_target(layers=8)  # what is imported and built for the first time takes memory, too
    with little_memory(), pytest.raises(FormatError, match=message) as caught:
        read(path, **options)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 4000
