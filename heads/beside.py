"""Files that are whole or not there: written in a hidden folder beside their place, then renamed to it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Where to write what becomes ``path`` when the block ends well; nothing of it is left when it does not.

    A folder, not a file: safetensors puts one of its own beside what it writes, under a name that nobody knows, and a
    process that was killed would leave it for good. What such a process left here goes when the file is written again.
    """
    folder = path.with_name(f".{path.name}.partial")
    if folder.is_file():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder / path.name
        os.replace(folder / path.name, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
