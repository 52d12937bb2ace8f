"""Folders of other projects' checkpoints: what to read in one, and how a new one comes to be."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from heads.formats.checkpoint import Checkpoint, read_files, read_index, read_json
from heads.formats.format import FormatError, listed
from heads.formats.pickled import read_pickled

CONFIG = "config.json"
# in this order: a whole file is preferred to shards, as transformers does
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "medusa_lm_head.safetensors",
    "economize_model.safetensors",
)
CONFIGS = {"economize_model.safetensors": "economize_config.json"}  # of weights whose config is no config.json
PICKLES = (".pt", ".bin", ".pth")
READERS = {
    ".safetensors": lambda path: read_files([path], path),
    ".json": read_index,
    **dict.fromkeys(PICKLES, read_pickled),
}


def open_checkpoint(path: str | Path) -> Checkpoint:
    """A checkpoint by its folder or by its weights' file; the configuration is the config.json beside the weights.

    Raises:
        FormatError: there are no weights, or they are a pickle that was not named, or anything about them is wrong.
    """
    path = Path(path)
    if not path.exists():
        raise FormatError(f"there is no {path}: name the folder of a checkpoint, or its weights' file")
    file = weights_in(path) if path.is_dir() else path
    if file.suffix not in READERS:
        raise FormatError(f"{file} is none of {', '.join(READERS)}")
    config = file.parent / CONFIGS.get(file.name, CONFIG)
    return replace(READERS[file.suffix](file), config=read_json(config) if config.is_file() else {})


def weights_in(folder: Path) -> Path:
    """The weights' file of a checkpoint's folder.

    Raises:
        FormatError: there is none that may be read.
    """
    for name in WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    raise no_weights(str(folder), [item.name for item in folder.iterdir()], "name that file itself")


def no_weights(where: str, files: Sequence[str], how: str) -> FormatError:
    """What is said of a place whose files are none of ``WEIGHTS``; ``how`` to have a pickle read."""
    if "heads.safetensors" in files:
        return FormatError(f"{where} holds heads of this project: there is nothing to import, use them as they are")
    if "adapter.safetensors" in files and "adapter.json" in files:
        return FormatError(f"{where} holds an adapter of heads: make heads of it first (`headstart merge`)")
    if pickles := [name for name in files if Path(name).suffix in PICKLES]:
        return FormatError(
            f"{where} has its weights only as a pickle ({listed(pickles)}): {how} to have it read (as tensors alone, "
            "running nothing)"
        )
    return FormatError(f"{where} has none of {', '.join(WEIGHTS)} (it holds {listed(files) or 'nothing'})")


def check_new(folder: Path) -> None:
    """Refuse a folder that holds something.

    Raises:
        FileExistsError: nothing is ever overwritten.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is there already and not empty: name a new folder, or remove it first")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill beside the one asked for, which it becomes when all went well.

    Raises:
        FileExistsError: the one asked for is there and not empty: nothing is ever overwritten.
    """
    check_new(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        partial.chmod(0o755)  # mkdtemp makes it private
        yield partial
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_folder(folder: Path, config: dict[str, Any], weights: str, tensors: dict[str, Tensor]) -> None:
    """Write config.json and the weights' file, whole or not at all.

    Raises:
        OSError: the folder holds something, or the disk refused.
    """
    with new_folder(folder) as partial:
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        try:
            save_file(tensors, partial / weights, metadata={"format": "pt"})
            # safetensors makes it private; a server may run as somebody else
            (partial / weights).chmod((partial / CONFIG).stat().st_mode & 0o777)
        except SafetensorError as problem:  # how it tells of a full disk
            raise OSError(f"{folder / weights} could not be written ({problem})") from problem
