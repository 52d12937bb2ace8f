"""Preparing that is stopped, killed, or done by several processes: the result is the same, and nothing else is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from data import folder as folders
from data import parts as module
from data.prepare import load, prepare
from tests.data import toys
from tests.data.streamed import write_long_file
from tests.data.test_prepare import GOOD, MASK
from tests.data.toys import chat, write_jsonl

ROOT = Path(__file__).resolve().parents[2]


def test_a_failed_run_leaves_the_old_folder_and_the_next_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write_jsonl(tmp_path / "rows", [GOOD, GOOD, GOOD]), tmp_path / "out"
    prepare([source], toys.tokenizer(), out)
    write = module.PartWriter.write

    def full(self: module.PartWriter, index: int, chunk: module.Chunk) -> int:
        if index == 1:
            raise OSError(28, "No space left on device")
        return write(self, index, chunk)

    with monkeypatch.context() as patch:
        patch.setattr(module.PartWriter, "write", full)
        with pytest.raises(OSError, match="No space left"):
            prepare([source], toys.tokenizer(), out, max_length=10, chunk=1)
    assert load(out)["loss_mask"] == [MASK] * 3
    report = prepare([source], toys.tokenizer(), out, max_length=10, chunk=1)
    assert (report.resumed, report.kept, report.rows) == (1, {"train": 3}, 3)
    assert load(out)["loss_mask"] == [MASK[:8]] * 3
    assert sorted(os.listdir(tmp_path)) == ["out", "rows"]


def test_a_stopped_run_with_other_settings_is_swept_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stale parts are neither used nor left; a folder of that name with something else in it is."""
    source, out = write_jsonl(tmp_path / "rows", [GOOD]), tmp_path / "out"

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(folders, "place", stop)
        patch.setattr("data.prepare.place", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare([source], toys.tokenizer(), out)
        with pytest.raises(KeyboardInterrupt):
            prepare([source], toys.tokenizer(), out, max_length=7)
    (left,) = [name for name in os.listdir(tmp_path) if name.startswith(".out")]
    (tmp_path / left / "notes.txt").write_text("mine")
    report = prepare([source], toys.tokenizer(), out, max_length=9)
    assert (report.resumed, load(out)[0]["loss_mask"]) == (0, MASK[:8])
    assert sorted(os.listdir(tmp_path)) == [left, "out", "rows"]
    (tmp_path / left / "notes.txt").unlink()
    assert prepare([source], toys.tokenizer(), out, max_length=9).reused
    assert sorted(os.listdir(tmp_path)) == ["out", "rows"]


def test_a_run_that_was_stopped_while_it_took_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = write_jsonl(tmp_path / "rows", [GOOD]), tmp_path / "out"
    prepare([source], toys.tokenizer(), out)
    rename = Path.rename

    def stop_at_the_second(self: Path, target: Path) -> Path:
        if self.name == "whole":
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", stop_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            prepare([source], toys.tokenizer(), out, max_length=9)
    assert not out.exists()
    assert prepare([source], toys.tokenizer(), out).reused  # the earlier one is back
    assert prepare([source], toys.tokenizer(), out, max_length=9).kept == {"train": 1}
    assert sorted(os.listdir(tmp_path)) == ["out", "rows"]


def test_two_runs_at_once_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        folders.working(tmp_path / "out", "key"),
        pytest.raises(OSError, match="another run is preparing"),
        folders.working(tmp_path / "out", "key"),
    ):
        pass
    assert os.listdir(tmp_path) == []


def test_processes_change_nothing(tmp_path: Path) -> None:
    rows = [GOOD, {"messages": chat("x", "y" * 30), "id": 3}, {"conversations": []}, {"text": "t"}] * 3
    source = write_jsonl(tmp_path / "rows", rows)
    one = prepare([source], toys.tokenizer(), tmp_path / "one", max_length=20, processes=1, chunk=2)
    seen: list[int] = []
    two = prepare(
        [source],
        toys.tokenizer(),
        tmp_path / "two",
        max_length=20,
        processes=2,
        chunk=5,
        progress=lambda stage, done, total: seen.append(done),
    )
    assert one == two
    assert sorted(seen) == seen and seen[-1] == 12
    assert load(tmp_path / "one").to_list() == load(tmp_path / "two").to_list()
    assert (one.rows, one.kept, one.dropped) == (12, {"train": 9}, {"no turns": 3})


KILLED = """
import sys
from data.prepare import prepare
from tests.data import toys

source, out = sys.argv[1:]
prepare([source], toys.tokenizer(), out, processes=2, chunk=4, progress=lambda *_: print("part", flush=True))
"""


def test_a_killed_run_leaves_no_workers_and_is_gone_on_with(tmp_path: Path) -> None:
    source = tmp_path / "rows"
    write_long_file(source, 400)
    command = [sys.executable, "-c", KILLED, str(source), str(tmp_path / "out")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "part\n"
        workers = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert len(workers) >= 2
    assert psutil.wait_procs(workers, timeout=60)[1] == []
    assert not (tmp_path / "out").exists()
    report = prepare([source], toys.tokenizer(), tmp_path / "out", processes=1, chunk=4)
    assert 4 <= report.resumed < 400
    whole = prepare([source], toys.tokenizer(), tmp_path / "whole", processes=1)
    assert load(tmp_path / "out").to_list() == load(tmp_path / "whole").to_list()
    assert (report.tokens, report.supervised, report.kept) == (whole.tokens, whole.supervised, {"train": 400})
    assert sorted(os.listdir(tmp_path)) == ["out", "rows", "whole"]
