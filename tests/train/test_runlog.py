"""log.jsonl is cut to where a run goes on from, whatever stands behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

from train.runlog import RunLog


def written(folder: Path, *steps: int) -> RunLog:
    log = RunLog(folder)
    for step in steps:
        log.append(step, {"train/loss": step / 2})
    return log


def steps(log: RunLog) -> list[str]:
    return log.path.read_text().splitlines()


def test_what_was_logged_after_the_checkpoint_goes(tmp_path: Path) -> None:
    log = written(tmp_path, 1, 2)
    size = log.bytes
    written(tmp_path, 2, 3)  # an evaluation of the same step, made after the checkpoint
    assert log.cut(2, size) == 2
    assert steps(log) == ['{"step": 1, "train/loss": 0.5}', '{"step": 2, "train/loss": 1.0}']
    assert log.cut(2, size) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


@pytest.mark.parametrize("half", [b'{"step": 3, "tra', b"\x00\x00\x00", b'{"step": 3}'])
def test_a_half_written_line_goes(half: bytes, tmp_path: Path) -> None:
    log = written(tmp_path, 1, 2)
    with log.path.open("ab") as file:
        file.write(half)
    assert log.cut(9, log.bytes) == 1
    assert len(steps(log)) == 2


def test_a_log_that_was_lost_in_part_keeps_its_whole_lines(tmp_path: Path) -> None:
    """It is shorter than the checkpoint says: what is there of earlier steps stays."""
    log = written(tmp_path, 1, 5)
    assert log.cut(3, 10_000) == 1
    assert steps(log) == ['{"step": 1, "train/loss": 0.5}']


def test_a_run_from_the_start_has_no_log(tmp_path: Path) -> None:
    log = written(tmp_path, 1, 2)
    assert log.cut(0, 0) == 2
    assert list(tmp_path.iterdir()) == []
    assert log.cut(0, 0) == 0 and log.bytes == 0
