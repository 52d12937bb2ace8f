"""Heads on disk: config.json and heads.safetensors, written whole or not at all, read strictly.

Weights start as NaN when they are loaded, so that a tensor that no file set cannot pass for a trained one.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from heads.adapter import put_on, read_record
from heads.base import DraftHeads
from heads.beside import beside
from heads.config import ConfigError, HeadsConfig
from heads.derived import recorded
from heads.hub import Access, HubError, Place, fetch_target, locate
from heads.kinds import build
from heads.layout import ADAPTER, CONFIG, CONFIG_BYTES, FACTORS, HEADS, WEIGHTS, read_object
from heads.target import Target
from heads.tuned import merge
from heads.vocabulary import check_ids

LISTED = 8  # tensors that a message names of one kind
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class HeadsFileError(ValueError):
    """A heads folder that cannot be loaded as it stands."""


def save(heads: DraftHeads, folder: str | Path) -> None:
    """Write the heads into ``folder``; each file beside its place first, the weights before the config.

    Raises:
        OSError: the disk refused; what stood in the folder before is still whole.
        HeadsFileError: a tensor is not whole here (one that is spread over processes, outside its gathering).
        ValueError: the draft vocabulary was never set.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in heads.state_dict().items()}
    expected = build(heads.config, heads.target, check=False, device="meta").state_dict()  # shapes alone
    partial = [
        f"{name} is {tuple(tensor.shape)} where {tuple(expected[name].shape)} is expected"
        for name, tensor in tensors.items()
        if name in expected and tensor.shape != expected[name].shape
    ]
    if partial:
        raise HeadsFileError(f"not whole in this process: {'; '.join(partial)}. Gather sharded weights before saving")
    if heads.config.draft_vocab_size is not None:
        check_ids(heads.target_ids, heads.config.draft_vocab_size, heads.config.vocab_size)
    try:
        with beside(folder / CONFIG) as config, beside(folder / WEIGHTS) as weights:  # the inner one is placed first
            save_file(tensors, weights, metadata={"format": "pt"})
            config.write_text(json.dumps(heads.config.to_dict(), indent=2) + "\n", encoding="utf-8")
            weights.chmod(config.stat().st_mode & 0o777)  # safetensors makes it private, whatever the umask is
    except SafetensorError as error:  # how it tells of a full disk
        raise OSError(f"{folder / WEIGHTS} could not be written ({error})") from error


def read_config(folder: Path) -> HeadsConfig:
    """The folder's config.json.

    Raises:
        HeadsFileError: there is none, or it is no JSON object.
        ConfigError: it has unknown, missing or wrong entries.
    """
    path = folder / CONFIG
    if not path.is_file():
        inside = f" (its {HEADS}/ is one)" if (folder / HEADS / CONFIG).is_file() else ""
        adapter = " but an adapter of one: `headstart merge` makes heads of it" if (folder / ADAPTER).is_file() else ""
        raise HeadsFileError(f"{folder} has no {CONFIG}: it is not a heads folder{inside}{adapter}")
    try:
        stored = read_object(path, CONFIG_BYTES, "configuration")
    except ValueError as error:
        raise HeadsFileError(str(error)) from None
    if "kind" not in stored and stored.keys() & {"architectures", "model_type", "medusa_num_heads"}:
        raise HeadsFileError(
            f"{path} is a model's or another project's, not that of heads: `headstart import` makes heads of others'"
        )
    return HeadsConfig.from_dict(stored, str(path))


def load(
    path_or_repo: str | Path,
    target: Target | PreTrainedModel | None = None,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    dtype: torch.dtype | None = None,
    allow_mismatch: bool = False,
    token: str | None = None,
    base: str | None = None,
) -> DraftHeads:
    """Load heads from a folder or a Hub repository: of heads alone, of heads with their target, or of an adapter, which
    is then merged with the heads that it belongs on.

    Args:
        target: the model they belong to; when None the one that came along, or the one that their config names.
        revision: of the Hub repository.
        subfolder: of the folder or repository, in which the heads lie.
        cache_dir: folder of downloads, for heads and target.
        local_files_only: never ask the Hub.
        dtype: of the heads; the target's by default.
        allow_mismatch: run on a target that is not the one they were trained on.
        token: for private repositories.
        base: of an adapter: where the heads are that it belongs on, if not where its record says.

    Raises:
        HeadsFileError: files are missing or broken, tensors are missing, unexpected or of another shape, or an adapter
            belongs on other heads than those found.
        TargetMismatch: the target is another one.
        HubError: see :func:`heads.hub.locate`.
        OSError: the target that they name is not there, or an adapter's heads are not.
        ValueError: ``base`` of what is no adapter.
    """
    access = Access(revision, cache_dir, local_files_only, token)
    place = locate(path_or_repo, access, subfolder=subfolder)
    record = read_record(place.folder) if (place.folder / ADAPTER).is_file() else None
    if record is None and base is not None:
        raise ValueError(f"{path_or_repo} is no adapter, so it belongs on no other heads: leave base= out")
    config = read_config(place.folder) if record is None else record.heads
    target = target_for(config, place, target, access, dtype, allow_mismatch=allow_mismatch)
    if record is None:
        return read_weights(config, place.folder, target, dtype)
    return merge(put_on(record, place, target, base=base, access=access)).to(dtype or target.dtype)


def target_for(
    config: HeadsConfig,
    place: Place,
    target: Target | PreTrainedModel | None,
    access: Access,
    dtype: torch.dtype | None,
    *,
    allow_mismatch: bool,
) -> Target:
    """The target that heads are to read: the one that was given, or that came along, or that they name; checked."""
    if target is None:
        target = _load_target(config, place, access, dtype)
    elif not isinstance(target, Target):
        target = Target(target)
    target.check(config.target, allow_mismatch=allow_mismatch)
    target.self_check()
    return target


def read_weights(config: HeadsConfig, folder: Path, target: Target, dtype: torch.dtype | None = None) -> DraftHeads:
    """Heads of a config on a target that was checked, with the folder's weights.

    Both may come from anybody, so what the config asks for is held against the file before any memory is taken.
    """
    expected = build(config, target, check=False, device="meta").state_dict()
    tensors = read_tensors(folder / WEIGHTS, expected)
    heads = build(config, target, check=False).to(device=target.device, dtype=dtype or target.dtype)
    for parameter in heads.parameters():
        parameter.data.fill_(float("nan"))
    heads.load_state_dict(tensors, strict=True)
    if config.draft_vocab_size is not None:
        heads.set_draft_vocabulary(tensors["target_ids"])
    return heads.eval()


def _load_target(config: HeadsConfig, place: Place, access: Access, dtype: torch.dtype | None) -> Target:
    """The bundle's own target, or the one that the config names."""
    if place.bundle is not None:
        there = str(fetch_target(place, access))
        return Target.load(config.target.name, source=there, dtype=dtype or torch.bfloat16)
    try:
        return recorded(config.target, dtype, **access.of_target())
    except OSError as problem:
        told = f"the target {config.target.name} of these heads cannot be loaded: {problem}"
        raise (HubError if isinstance(problem, HubError) else OSError)(
            f"{told}. If it is elsewhere now, name it: target=, or --target on the command line"
        ) from None


def weights_digest(folder: Path) -> str:
    """SHA-256 of a folder's heads.safetensors (of an adapter: adapter.safetensors), by which a report says which heads
    it is of.

    Raises:
        HeadsFileError: there is none.
    """
    path = folder / (FACTORS if (folder / ADAPTER).is_file() else WEIGHTS)
    if not path.is_file():
        raise HeadsFileError(f"{path} is missing")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def count_parameters(path: Path) -> int:
    """Numbers trained: the floating-point tensors of a file, without the map of the draft vocabulary.

    Raises:
        HeadsFileError: the file is missing or not whole.
    """
    if not path.is_file():
        raise HeadsFileError(f"{path} is missing, or no plain file")
    try:
        with safe_open(path, "pt") as file:
            slices = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118 (the file is no mapping)
            return sum(
                math.prod(part.get_shape()) for part in slices if part.get_dtype() in ("F64", "F32", "F16", "BF16")
            )
    except SafetensorError as problem:
        raise HeadsFileError(f"{path} is not a whole safetensors file ({problem}): save the heads again") from None


def read_tensors(path: Path, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a safetensors file, if they are exactly the expected ones.

    Raises:
        HeadsFileError: the file is missing, cut short or no safetensors, or names, shapes or dtypes differ (the
            first of them are listed).
    """
    if not path.is_file():
        raise HeadsFileError(f"{path} is missing")
    try:
        with safe_open(path, "pt") as file:
            names = set(file.keys())
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
            problems = _problems(shapes, expected)
            if problems:
                raise HeadsFileError(f"{path} does not hold the weights its config describes: {'; '.join(problems)}")
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, struct.error) as error:
        raise HeadsFileError(f"{path} is not a whole safetensors file ({error}): copy or save it again") from None
    _check_dtypes(path, tensors, expected)
    return tensors


def _check_dtypes(path: Path, tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Floats where floats are meant, and whole numbers for ids: loading would cast anything to anything."""
    wrong = [
        f"{name} as {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in tensors.items()
        if (tensor.dtype not in FLOATS if expected[name].is_floating_point() else tensor.dtype != expected[name].dtype)
    ]
    if wrong:
        raise HeadsFileError(f"{path} stores {', '.join(sorted(wrong))}: floats are expected, and int64 for ids")


def _problems(shapes: dict[str, tuple[int, ...]], expected: dict[str, Tensor]) -> list[str]:
    missing, unexpected = sorted(expected.keys() - shapes.keys()), sorted(shapes.keys() - expected.keys())
    problems = []
    if missing:
        problems.append(f"missing {_listed(missing, ', ')}")
    if unexpected:
        problems.append(f"unexpected {_listed(unexpected, ', ')}")
    wrong = [
        f"{name} is {shapes[name]} where {tuple(expected[name].shape)} is expected"
        for name in sorted(expected.keys() & shapes.keys())
        if shapes[name] != tuple(expected[name].shape)
    ]
    return [*problems, _listed(wrong, "; ")] if wrong else problems


def _listed(items: list[str], between: str) -> str:
    """The first few, and how many there are beside them."""
    rest = len(items) - LISTED
    return between.join(items[:LISTED]) + (f"{between}and {rest} more" if rest > 0 else "")


__all__ = [
    "CONFIG",
    "WEIGHTS",
    "ConfigError",
    "HeadsFileError",
    "count_parameters",
    "load",
    "read_config",
    "read_tensors",
    "read_weights",
    "save",
    "weights_digest",
]
