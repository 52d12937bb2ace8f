"""Adapters of heads on disk and on the Hub: the low-rank factors alone, and which heads they belong on.

::

    adapter/  adapter.json          the factors' settings, the heads' config, the heads they belong on: where these are
                                    (folder, or Hub id and commit; null: beside it, in base/) and their hash
              adapter.safetensors   LAYER.lora_A.weight, LAYER.lora_B.weight
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from heads.base import DraftHeads
from heads.beside import beside
from heads.config import ConfigError, HeadsConfig
from heads.hub import ANYHOW, REPO_ID, Access, HubError, Place, locate
from heads.identity import hash_all
from heads.layout import ADAPTER, BASE, CONFIG_BYTES, FACTORS, WEIGHTS, read_object
from heads.target import Target
from heads.tuned import base_tensors, factors, inject

FLOATS = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}


@dataclass(frozen=True)
class Record:
    """What an adapter.json says.

    Attributes:
        heads: the adapted heads' config, with ``lora``.
        base: folder or Hub id of the heads that it belongs on; None when they lie beside it, in ``base/``.
        base_sha256: of their tensors in ``base_dtype``, see :func:`base_digest`.
        base_revision: commit of the Hub repository; None for the newest.
    """

    heads: HeadsConfig
    base: str | None
    base_sha256: str
    base_dtype: str
    base_revision: str | None = None

    def to_bytes(self) -> bytes:
        """The file."""
        stored: dict[str, Any] = {"base": self.base}
        if self.base_revision is not None:
            stored["base_revision"] = self.base_revision
        stored |= {"base_sha256": self.base_sha256, "base_dtype": self.base_dtype, "heads": self.heads.to_dict()}
        return (json.dumps(stored, indent=2) + "\n").encode()


def read_record(folder: Path) -> Record:
    """The adapter.json of a folder, which may come from anybody.

    Raises:
        HeadsFileError: it is no adapter's record.
        ConfigError: the config in it has unknown, missing or wrong entries.
    """
    from heads.store import HeadsFileError

    path = folder / ADAPTER
    try:
        stored = read_object(path, CONFIG_BYTES, "adapter's record")
        config = HeadsConfig.from_dict(stored["heads"], str(path))
        base, revision, digest, dtype = (
            stored["base"],
            stored.get("base_revision"),
            stored["base_sha256"],
            stored["base_dtype"],
        )
        if not isinstance(dtype, str) or dtype not in FLOATS:
            raise HeadsFileError(
                f"{path} is not an adapter's record: base_dtype is {dtype!r:.80}, not one of {', '.join(FLOATS)}"
            )
    except KeyError as error:
        raise HeadsFileError(f"{path} is not an adapter's record: it has no {error}") from None
    except TypeError as error:
        raise HeadsFileError(f"{path} is not an adapter's record ({error})") from None
    except (ConfigError, HeadsFileError):
        raise
    except ValueError as error:
        raise HeadsFileError(f"{error}: it is not an adapter's record") from None
    texts = {"base": (base, True), "base_revision": (revision, True), "base_sha256": (digest, False)}
    wrong = [
        f"{name} is {value!r:.80}"
        for name, (value, optional) in texts.items()
        if not (isinstance(value, str) or (optional and value is None))
    ]
    if wrong:
        raise HeadsFileError(f"{path} is not an adapter's record ({'; '.join(wrong)})")
    if config.lora is None:
        raise HeadsFileError(f"{path} names no factors")
    return Record(config, base, digest, dtype, revision)


def save_adapter(heads: DraftHeads, folder: Path, base: str | None) -> None:
    """Write the factors, and which heads they belong on.

    Args:
        base: their folder or Hub id; None when they are put beside, into ``base/``.

    Raises:
        ConfigError: there is no adapter on them.
        OSError: the disk refused.
    """
    if heads.config.lora is None:
        raise ConfigError("these heads have no adapter to save")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in factors(heads).items()}
    record = Record(
        heads.config,
        str(Path(base).resolve()) if base is not None and Path(base).is_dir() else base,
        hash_all(base_tensors(heads).items()),
        str(next(heads.parameters()).dtype).removeprefix("torch."),
    )
    for name, write in (
        (FACTORS, lambda path: save_file(tensors, path, metadata={"format": "pt"})),
        (ADAPTER, lambda path: path.write_bytes(record.to_bytes())),
    ):
        try:
            with beside(folder / name) as partial:
                write(partial)
        except SafetensorError as error:  # how it tells of a full disk
            raise OSError(f"{folder / name} could not be written ({error})") from error


def base_digest(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> str:
    """Hash of heads' tensors as they are when they are loaded in a dtype: what a record knows the heads by."""
    return hash_all((name, value.to(dtype) if value.is_floating_point() else value) for name, value in tensors.items())


def find_base(
    record: Record, place: Place, base: str | None = None, revision: str | None = None, access: Access = ANYHOW
) -> Place:
    """Where the heads are that an adapter belongs on; whether they are the right ones is not looked at.

    Args:
        place: of the adapter.
        base: where they are, if not where the record says, and their ``revision``.
        access: how to reach the Hub; its own revision is the adapter's.

    Raises:
        HeadsFileError: the record of an adapter from the Hub names a folder, or what it names is an adapter too.
        OSError: they are not there, HubError and FileNotFoundError among these; says how to name another place.
    """
    from heads.store import HeadsFileError

    if base is None and record.base is None:
        base = str(place.folder / BASE)
    elif base is None:
        base, revision = record.base, record.base_revision
        if place.commit is not None and not REPO_ID.fullmatch(str(base)):
            raise HeadsFileError(f"{place.name} names {base!r} for the heads it belongs on, which is no Hub id")
    assert base is not None
    if Path(base).resolve() == place.folder.resolve():
        raise HeadsFileError(f"{place.folder / ADAPTER} names no heads to be put on")
    try:
        found = locate(base, Access(revision, access.cache_dir, access.local_files_only, access.token))
    except OSError as problem:
        kind = type(problem) if type(problem) in (HubError, FileNotFoundError) else OSError
        at = "" if revision is None else f" (revision {revision})"
        raise kind(
            f"the heads {base}{at}, on which the adapter {place.name} belongs, cannot be had: {problem}. If they are "
            "elsewhere now, name them: base=, or --heads of `headstart merge`"
        ) from None
    if (found.folder / ADAPTER).is_file():  # two could name each other
        raise HeadsFileError(f"{place.name} belongs on {base}, which is an adapter too: merge that first")
    return found


def check_base(record: Record, place: Place, base: Place) -> HeadsConfig:
    """Hold a base's file against the record, without a target; its config.

    Raises:
        HeadsFileError: they are other heads, or the file is missing or broken.
    """
    from heads.store import HeadsFileError, read_config

    config = read_config(base.folder)
    try:
        found = base_digest(load_file(base.folder / WEIGHTS), FLOATS[record.base_dtype])
    except (SafetensorError, FileNotFoundError) as problem:
        raise HeadsFileError(f"{base.folder / WEIGHTS} is not a whole safetensors file ({problem})") from None
    if found != record.base_sha256:
        raise HeadsFileError(_other(record, place, base, found))
    return config


def _other(record: Record, place: Place, base: Place, found: str) -> str:
    at = "" if base.commit is None else f" at {base.commit}"
    return (
        f"{base.name}{at} are not the heads that {place.name} was trained on (hash {record.base_sha256[:12]}… there, "
        f"{found[:12]}… here): name those with base=, or --heads of `headstart merge`"
    )


def put_on(
    record: Record, place: Place, target: Target, *, base: str | None = None, access: Access = ANYHOW
) -> DraftHeads:
    """The heads that an adapter belongs on, with its factors on them, not merged, in the dtype it was trained in.

    Raises:
        HeadsFileError: files are missing or do not fit, or the base heads are other ones.
        OSError: the base heads are not there; see :func:`find_base`.
    """
    from heads.store import HeadsFileError, read_config, read_tensors, read_weights

    found = find_base(record, place, base, None, access)
    own = read_config(found.folder)
    described = replace(own, target=record.heads.target, lora=record.heads.lora)  # of another target it may be
    heads = read_weights(own, found.folder, target, FLOATS[record.base_dtype])
    digest = hash_all(heads.state_dict().items())
    if digest != record.base_sha256 or described != record.heads:
        raise HeadsFileError(_other(record, place, found, digest))
    heads.config = record.heads
    inject(heads)
    held = factors(heads)
    tensors = read_tensors(place.folder / FACTORS, held)
    with torch.no_grad():
        for key, tensor in held.items():
            tensor.copy_(tensors[key])
    return heads.eval()


def load_adapter(
    path_or_repo: str | Path,
    target: Any = None,
    *,
    base: str | None = None,
    allow_mismatch: bool = False,
    access: Access = ANYHOW,
) -> DraftHeads:
    """Heads with the adapter of a folder or Hub repository on them, not merged.

    Args:
        target: the target they were adapted to; loaded by the adapter's record when None.
        base: where the heads are that it belongs on, if not where the record says.

    Raises:
        HeadsFileError, OSError: see :func:`put_on`.
        TargetMismatch: another target than they were adapted to.
    """
    from heads.store import target_for

    place = locate(path_or_repo, access)
    record = read_record(place.folder)
    target = target_for(record.heads, place, target, access, None, allow_mismatch=allow_mismatch)
    return put_on(record, place, target, base=base, access=access)
