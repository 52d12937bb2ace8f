"""A whole folder of another project's, to be broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.heads.formats.edit import eagle


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A flat EAGLE-3 folder."""
    eagle(tmp_path / "out")
    return tmp_path / "out"
