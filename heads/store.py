"""Heads on disk: config.json and heads.safetensors, written whole or not at all, read strictly.

Weights start as NaN when they are loaded, so that a tensor that no file set cannot pass for a trained one.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from heads.base import DraftHeads
from heads.config import ConfigError, HeadsConfig
from heads.derived import recorded
from heads.kinds import build
from heads.target import Target
from heads.tuned import ADAPTER, load_adapter, merge
from heads.vocabulary import check_ids

CONFIG, WEIGHTS = "config.json", "heads.safetensors"


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
    with torch.device("meta"):  # shapes alone
        expected = build(heads.config, heads.target, check=False).state_dict()
    partial = [
        f"{name} is {tuple(tensor.shape)} where {tuple(expected[name].shape)} is expected"
        for name, tensor in tensors.items()
        if name in expected and tensor.shape != expected[name].shape
    ]
    if partial:
        raise HeadsFileError(f"not whole in this process: {'; '.join(partial)}. Gather sharded weights before saving")
    if heads.config.draft_vocab_size is not None:
        check_ids(heads.target_ids, heads.config.draft_vocab_size, heads.config.vocab_size)
    weights, config = folder / f".{WEIGHTS}.partial", folder / f".{CONFIG}.partial"
    try:
        save_file(tensors, weights, metadata={"format": "pt"})
        config.write_text(json.dumps(heads.config.to_dict(), indent=2) + "\n", encoding="utf-8")
        os.replace(weights, folder / WEIGHTS)
        os.replace(config, folder / CONFIG)
    except SafetensorError as error:  # how it tells of a full disk
        raise OSError(f"{folder / WEIGHTS} could not be written ({error})") from error
    finally:
        weights.unlink(missing_ok=True)
        config.unlink(missing_ok=True)


def read_config(folder: Path) -> HeadsConfig:
    """The folder's config.json.

    Raises:
        HeadsFileError: there is none, or it is no JSON object.
        ConfigError: it has unknown, missing or wrong entries.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise HeadsFileError(f"{folder} has no {CONFIG}: it is not a heads folder")
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise HeadsFileError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(stored, dict):
        raise HeadsFileError(f"{path} must hold a JSON object, not a {type(stored).__name__}")
    return HeadsConfig.from_dict(stored, str(path))


def load(
    path_or_repo: str | Path,
    target: Target | PreTrainedModel | None = None,
    *,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    allow_mismatch: bool = False,
    token: str | None = None,
) -> DraftHeads:
    """Load heads from a folder or a Hub repository.

    Args:
        target: the model they belong to; loaded from the config's target record when None.
        revision: of the Hub repository.
        dtype: of the heads; the target's by default.
        allow_mismatch: run on a target that is not the one they were trained on.
        token: for private repositories.

    Raises:
        HeadsFileError: files are missing or broken, or tensors are missing, unexpected or of another shape.
        TargetMismatch: the target is another one.
    """
    from heads.hub import fetch

    folder = fetch(path_or_repo, revision=revision, token=token)
    if (folder / ADAPTER).is_file():
        adapted = merge(load_adapter(folder, target, allow_mismatch=allow_mismatch))
        return adapted.to(dtype or adapted.target.dtype)
    config = read_config(folder)
    if target is None:
        target = recorded(config.target, dtype)
    elif not isinstance(target, Target):
        target = Target(target)
    target.check(config.target, allow_mismatch=allow_mismatch)
    target.self_check()
    heads = build(config, target, check=False).to(device=target.device, dtype=dtype or target.dtype)
    tensors = read_tensors(folder / WEIGHTS, heads.state_dict())
    for parameter in heads.parameters():
        parameter.data.fill_(float("nan"))
    heads.load_state_dict(tensors, strict=True)
    if config.draft_vocab_size is not None:
        heads.set_draft_vocabulary(tensors["target_ids"])
    return heads.eval()


def read_tensors(path: Path, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a safetensors file, if they are exactly the expected ones.

    Raises:
        HeadsFileError: the file is missing, cut short or no safetensors, or names or shapes differ (all are listed).
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
            return {name: file.get_tensor(name) for name in names}
    except (SafetensorError, struct.error) as error:
        raise HeadsFileError(f"{path} is not a whole safetensors file ({error}): copy or save it again") from None


def _problems(shapes: dict[str, tuple[int, ...]], expected: dict[str, Tensor]) -> list[str]:
    missing, unexpected = sorted(expected.keys() - shapes.keys()), sorted(shapes.keys() - expected.keys())
    problems = []
    if missing:
        problems.append(f"missing {', '.join(missing)}")
    if unexpected:
        problems.append(f"unexpected {', '.join(unexpected)}")
    for name in sorted(expected.keys() & shapes.keys()):
        if shapes[name] != tuple(expected[name].shape):
            problems.append(f"{name} is {shapes[name]} where {tuple(expected[name].shape)} is expected")
    return problems


__all__ = ["CONFIG", "WEIGHTS", "ConfigError", "HeadsFileError", "load", "read_config", "read_tensors", "save"]
