"""States that a cache of other heads holds already: one with more taps, or with the last state, which every cache has.

Heads of several kinds on one target and one data set then need one cache: EAGLE's three taps serve Medusa, whose tap is
the state that the output matrix reads, and any choice of taps among those there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from train.cache_spec import CacheSpec


@dataclass(frozen=True)
class Wider:
    """A cache whose rows hold what ``wanted`` asks for, among others."""

    wanted: CacheSpec
    spec: CacheSpec

    def pick(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The columns of ``wanted`` from those of ``spec``, each (T, width); bit for bit what a cache of them holds."""
        size, found = self.wanted.target.hidden_size, dict(columns)
        places = [self.spec.taps.index(tap) if tap in self.spec.taps else None for tap in self.wanted.taps]
        parts = [columns["hidden"] if at is None else columns["taps"][:, at * size : (at + 1) * size] for at in places]
        found["taps"] = torch.cat(parts, dim=-1)
        if "scales" in columns:
            found["scales"] = columns["scales"][:, [at for at in places if at is not None]]
        return found


def holds(spec: CacheSpec, taps: tuple[int, ...]) -> bool:
    """Whether a cache of these taps has what ``spec`` asks for.

    The last tap is the state behind the final norm, which caches keep in a column of its own; but not in eight bits.
    """
    own = {spec.target.num_layers} if spec.storage.value_dtype == spec.dtype else set()
    return set(spec.taps) <= set(taps) | own


def wider(spec: CacheSpec, root: Path) -> tuple[int, ...] | None:
    """Taps of the smallest whole cache under ``root`` that holds the states of ``spec`` beside others.

    None where there is none, or where a cache of ``spec`` itself was begun. A folder counts by its name, which its key
    gives, so what stands in a key file cannot pass one cache off as another.
    """
    if spec.folder(root).is_dir():
        return None
    found = []
    for key in sorted(root.glob("*/key.json")):
        taps = _taps(key)
        if taps is None or not holds(spec, taps):
            continue
        other = replace(spec, taps=taps)
        if other.folder(root) == key.parent and not other.missing(key.parent):
            found.append(taps)
    return min(found, key=len, default=None)


def _taps(key: Path) -> tuple[int, ...] | None:
    """Of a key file; None where it is none of ours."""
    try:
        taps = json.loads(key.read_text(encoding="utf-8"))["taps"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    whole = isinstance(taps, list) and taps and all(type(tap) is int for tap in taps)
    return tuple(taps) if whole else None
