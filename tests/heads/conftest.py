"""A heads folder of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from heads.base import DraftHeads
from tests.heads.small import STORED, small_heads, small_target


@pytest.fixture(params=STORED)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[DraftHeads, Path]:
    """Random heads, and the folder they were saved into."""
    made = small_heads(target=small_target(), **STORED[request.param])
    made.save_pretrained(tmp_path / "heads")
    return made, tmp_path / "heads"
