"""What lies where in a folder or repository of heads: the names of its files, and which of a target's belong beside.

Heads alone::                         A bundle, target and heads in one::

    config.json                           config.json, model.safetensors, tokenizer.json …   the target's own
    heads.safetensors                     heads/config.json
    README.md, plots/*.png                heads/heads.safetensors
    certificate.json                      README.md, plots/*.png, certificate.json
    custom_generate/generate.py           custom_generate/generate.py

An adapter, whose heads lie elsewhere or beside it in ``base/``::

    adapter.json, adapter.safetensors     base/config.json
    README.md, plots/*.png, …             base/heads.safetensors

A bundle's root is what transformers and serving engines load as the target, and they do not look into ``heads/``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

CONFIG, WEIGHTS = "config.json", "heads.safetensors"
CARD, CODE, CERTIFICATE, PLOTS = "README.md", "custom_generate/generate.py", "certificate.json", "plots"
HEADS = "heads"  # a bundle's folder of heads
ADAPTER, FACTORS = "adapter.json", "adapter.safetensors"
BASE = "base"  # an adapter's folder of the heads that it belongs on, where they came along

TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
INDEX = "model.safetensors.index.json"
INDEX_BYTES, CONFIG_BYTES = 64 << 20, 16 << 20  # at most, of files that may come from anybody
TARGET = (CONFIG, "generation_config.json", "model.safetensors", INDEX, *TOKENIZER)
SHARDS = "model-*-of-*.safetensors"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_PLOT = re.compile(rf"{PLOTS}/[\w-]+\.png")


def is_bundle(folder: Path) -> bool:
    """Whether a folder holds a target with heads in ``heads/``."""
    return not (folder / WEIGHTS).is_file() and all(
        (folder / name).is_file() for name in (CONFIG, f"{HEADS}/{CONFIG}", f"{HEADS}/{WEIGHTS}")
    )


def target_files(folder: Path) -> list[str]:
    """Files of a bundle's target: weights (with shards those that the index names), configuration, tokenizer.

    Raises:
        ValueError: there are no whole weights, as safetensors, or the index names what is none of its folder's.
    """
    shards: list[str] = []
    if (folder / INDEX).is_file() and not (folder / "model.safetensors").is_file():
        placed = read_object(folder / INDEX, INDEX_BYTES, "index of weights").get("weight_map")
        shards = sorted({str(name) for name in placed.values()}) if isinstance(placed, dict) else []
        outside = [name for name in shards if not _SHARD.fullmatch(name)]
        if outside or not shards:
            raise ValueError(f"{folder / INDEX} names what is no safetensors file of its folder: {str(outside)[:200]}")
    found = [name for name in TARGET if (folder / name).is_file() and (shards or name != INDEX)]
    missing = [name for name in shards or ["model.safetensors"] if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} has no {', '.join(missing)}: its target is not whole (weights must be safetensors)")
    return [*found, *shards]


def broken(folder: Path, names: Iterable[str]) -> str | None:
    """What is wrong with the first of some files that is no whole safetensors, or no JSON object; None if none is."""
    for path in (folder / name for name in names):
        try:
            if path.suffix == ".json" and path.is_file():
                read_object(path, INDEX_BYTES, "file of a model")
            elif path.suffix == ".safetensors" and path.is_file():
                with safe_open(path, "pt"):
                    pass
        except ValueError as problem:
            return str(problem)
        except SafetensorError as problem:
            return f"{path} is not a whole safetensors file ({problem})"
    return None


def read_object(path: Path, limit: int, what: str) -> dict[str, Any]:
    """A file's JSON object, which may come from anybody: ``what`` it is, and the bytes it may have at most.

    Raises:
        ValueError: it is larger, not JSON, or no object.
    """
    if path.stat().st_size > limit:
        raise ValueError(f"{path} is larger than {limit >> 20} MiB: it is no {what}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{path} is not valid JSON ({str(problem)[:200]})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(found).__name__}")
    return found


def belongs(name: str) -> bool:
    """Whether a file of a repository is of the kind that a push writes, so that a later push may take it away."""
    return (
        name in (WEIGHTS, CARD, CODE, CERTIFICATE, ADAPTER, FACTORS, *TARGET)
        or name in {f"{folder}/{file}" for folder in (HEADS, BASE) for file in (CONFIG, WEIGHTS)}
        or _SHARD.fullmatch(name) is not None
        or _PLOT.fullmatch(name) is not None
    )
