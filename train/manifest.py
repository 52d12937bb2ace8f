"""What a checkpoint's files were when it was written: sizes and hashes, and whether they still are."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from train.files import digest, sync
from train.ranks import Ranks

PROGRESS = "progress.json"
SEAL = "sha256"


def seal(content: dict[str, Any]) -> str:
    """The text of progress.json: ``content`` with a hash of itself."""
    return json.dumps(content | {SEAL: _hash(content)}, indent=1) + "\n"


def _hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_progress(place: Path) -> dict[str, Any]:
    """progress.json of a checkpoint that is whole."""
    content: dict[str, Any] = json.loads((place / PROGRESS).read_text(encoding="utf-8"))
    return content


def sizes_and_hashes(place: Path, ranks: Ranks) -> dict[str, list[Any]]:
    """Each file below ``place`` → bytes and SHA-256, on every process; each hashes and syncs a share."""
    ranks.wait()
    names = ranks.share(sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()))
    found = {}
    for name in names[ranks.index :: ranks.count]:
        sync(place / name)
        found[name] = [(place / name).stat().st_size, digest(place / name)]
    together: dict[str, list[Any]] = {}
    for part in ranks.collect(found):
        together |= part
    return dict(sorted(together.items()))


def fault(place: Path, ranks: Ranks) -> str | None:
    """What is broken about a checkpoint, the same on every process; None when it is what was written."""
    content, wrong = None, ""
    if ranks.main:
        try:
            content, wrong = _checked(place), ""
        except (ValueError, OSError) as error:
            wrong = str(error)
    content, wrong = ranks.share((content, wrong))
    if content is None:
        return str(wrong)
    files = content.get("files", {})  # a format without them says so when it is loaded
    mine = [_wrong(place, name, *files[name]) for name in sorted(files)[ranks.index :: ranks.count]]
    found = [text for part in ranks.collect([text for text in mine if text]) for text in part]
    return ", ".join(sorted(found)) or None


def _checked(place: Path) -> dict[str, Any]:
    """progress.json, if it is as it was written.

    Raises:
        ValueError, OSError: it is not; says why.
    """
    if not (place / PROGRESS).is_file():
        raise OSError(f"{PROGRESS} is missing")
    try:
        content = read_progress(place)
    except ValueError:
        raise ValueError(f"{PROGRESS} is cut short or no JSON") from None
    if not isinstance(content, dict) or ("format" in content and content.pop(SEAL, None) != _hash(content)):
        raise ValueError(f"{PROGRESS} is not what was written")
    return content


def _wrong(place: Path, name: str, size: int, sha256: str) -> str | None:
    path = place / name
    if not path.is_file():
        return f"{name} is missing"
    if path.stat().st_size != size:
        return f"{name} has {path.stat().st_size} bytes of {size}"
    return None if digest(path) == sha256 else f"{name} is not what was written"
