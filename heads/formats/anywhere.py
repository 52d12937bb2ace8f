"""Heads from wherever they lie: a folder or repository of this project's, a bundle, or another project's checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from heads.base import DraftHeads
from heads.derived import recorded
from heads.formats import read_heads, recorded_target
from heads.formats.checkpoint import read_header
from heads.formats.folder import CONFIGS, WEIGHTS, no_weights, open_checkpoint
from heads.formats.format import FormatError
from heads.hub import ANYHOW, Access, Place, download, fetch_target, list_files, locate
from heads.layout import ADAPTER, CONFIG, FACTORS, HEADS, SHARDS
from heads.layout import WEIGHTS as OWN
from heads.store import load, read_config, read_weights
from heads.target import Target


@dataclass(frozen=True)
class Source:
    """Some heads, found and not yet loaded.

    Attributes:
        name: as it was asked for.
        form: ``headstart``, or ``checkpoint`` for another project's.
        folder: the folder on this machine that was named, None for a Hub repository.
        commit: of the Hub repository they came from.
        files: the weights.
        load: the heads on a target (the one that came along or is recorded, for None), both in a dtype.
    """

    name: str
    form: str
    folder: Path | None
    commit: str | None
    files: tuple[Path, ...]
    load: Callable[[Target | None, torch.dtype], DraftHeads]

    def sha256(self) -> str:
        """Of the weights' file; where they are in shards, of the files' hashes, one a line."""
        each = []
        for path in self.files:
            with path.open("rb") as file:
                each.append(hashlib.file_digest(file, "sha256").hexdigest())
        return each[0] if len(each) == 1 else hashlib.sha256("\n".join(each).encode()).hexdigest()


def fetch_checkpoint(path_or_repo: str | Path, access: Access = ANYHOW, *, ours: bool = False) -> Path:
    """A checkpoint's folder or file; of a Hub repository its configuration and safetensors are downloaded.

    Args:
        ours: heads of this project will do as well, alone, in a bundle or as an adapter.

    Raises:
        HubError, FileNotFoundError: there is no such repository, or it cannot be had.
        FormatError: it has no weights that could be read; what it holds is said.
        ValueError: a revision of what lies on this machine.
    """
    name = str(path_or_repo)
    if Path(name).exists():
        if access.revision is not None:
            raise ValueError(f"{name} lies here and has no revision {access.revision!r}: only a Hub id has")
        return Path(name)
    own = [f"{inside}{file}" for inside in ("", f"{HEADS}/") for file in (OWN, CONFIG)] if ours else []
    own += [FACTORS, ADAPTER] if ours else []
    folder = download(name, [*own, CONFIG, *CONFIGS.values(), *WEIGHTS, SHARDS], access)
    if any((folder / file).is_file() for file in (*WEIGHTS, *own[::2])):
        return folder
    how = f"fetch it (`hf download {name} --local-dir FOLDER`) and name that file"
    raise no_weights(f"{name} on the Hub", list_files(name, access), how)


def find(path_or_repo: str | Path, *, engine: str | None = None, access: Access = ANYHOW) -> Source:
    """Find heads of any form; of a Hub repository only configuration and safetensors are downloaded.

    Args:
        engine: for which a checkpoint was made, where its config names layers.

    Raises:
        HubError, FileNotFoundError, FormatError: there are none.
    """
    name, path = str(path_or_repo), fetch_checkpoint(path_or_repo, access, ours=True)
    folder = None if not Path(name).exists() else path if path.is_dir() else path.parent
    commit = path.name if folder is None else None
    weights = next((file for file in (FACTORS, OWN, f"{HEADS}/{OWN}") if (path / file).is_file()), None)
    if weights is not None:
        found = locate(path_or_repo, access)

        def ours(target: Target | None, dtype: torch.dtype) -> DraftHeads:
            return load(name, target, dtype=dtype, revision=commit, token=access.token, cache_dir=access.cache_dir)

        return Source(name, "headstart", folder, commit, (found.folder / Path(weights).name,), ours)
    checkpoint = open_checkpoint(path)

    def theirs(target: Target | None, dtype: torch.dtype) -> DraftHeads:
        if target is None:
            told = recorded_target(checkpoint.config, path)
            if told is None:
                raise FormatError(f"{name} does not say which target it is for: name it with --target")
            target = Target.load(told, dtype=dtype)
        return read_heads(path, target, engine=engine).heads.to(dtype)

    return Source(name, "checkpoint", folder, commit, checkpoint.files, theirs)


def as_stored(
    place: Place, target_name: str | None = None, *, dtype: torch.dtype | Literal["auto"] = "auto"
) -> DraftHeads:
    """Heads of our own form in the dtype they are stored in, to be written again.

    Args:
        target_name: of their target, where it is no longer under its name.
        dtype: of the target; as it is stored for "auto".
    """
    config = read_config(place.folder)
    record = config.target
    if target_name is not None:
        target = Target.load(target_name, dtype=dtype)
    elif place.bundle is not None:
        target = Target.load(record.name, source=str(fetch_target(place, ANYHOW)), dtype=dtype)
    else:  # a quantized one only in the dtype that it was quantized in
        target = recorded(record, None if record.quantizer and dtype == "auto" else dtype)
    target.check(record)
    target.self_check()
    kept = [entry.dtype for entry in read_header(place.folder / OWN).values() if entry.dtype.is_floating_point]
    return read_weights(config, place.folder, target, max(kept, key=lambda kind: kind.itemsize, default=None))
