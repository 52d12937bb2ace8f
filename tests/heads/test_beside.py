"""A file is whole or not there, and what a killed process left goes when it is written again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from heads.beside import beside


def test_it_is_placed_when_all_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with beside(path) as partial:
        save_file({"x": torch.ones(3)}, partial)
        assert not path.exists()
    assert torch.equal(load_file(path)["x"], torch.ones(3)) and list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("before")
    with pytest.raises(OSError, match="full"), beside(path) as partial:
        partial.write_text("half")
        raise OSError("full")
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("left", [".a.partial", ".a.partial/.tmpQ2x4"])
def test_what_a_killed_process_left_is_gone_after_the_next(tmp_path: Path, left: str) -> None:
    (tmp_path / left).parent.mkdir(exist_ok=True)
    (tmp_path / left).write_text("half")
    with beside(tmp_path / "a") as partial:
        partial.write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "whole"
