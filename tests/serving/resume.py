"""A check that was stopped goes on: what was decoded is kept, and with ``--resume`` taken where the job is the same.

A job names all that decides what comes out, the contents of heads and exports included; only the code is not in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def resumed(
    resume: bool, folder: Path, job: dict[str, Any], work: Callable[..., dict[str, Any]], *given: Any
) -> dict[str, Any]:
    """What ``work`` finds from what it is given, or with ``resume`` what it found when the same job was done before."""
    done, result = folder / "done.json", folder / "result.json"
    if resume and done.is_file() and json.loads(done.read_text(encoding="utf-8")) == job:
        return dict(json.loads(result.read_text(encoding="utf-8")))
    done.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    found = work(*given)
    result.write_text(json.dumps(found), encoding="utf-8")
    done.write_text(json.dumps(job), encoding="utf-8")
    return found


def digest(folder: Path) -> str:
    """Of a folder's files, so that other weights are another job."""
    found = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()
