"""The prepared folder: what is in it, when it is used again, and what it never touches."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from data import prepare as module
from data.prepare import load, prepare
from tests.data import toys
from tests.data.toys import chat, write_jsonl

GOOD = {"messages": chat("hi", "ok", "a", "b")}
MASK = [False] * 5 + [True] * 3 + [False] * 4 + [True] * 2


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_columns_and_counts(tmp_path: Path) -> None:
    rows = [GOOD, {"id": 7, "messages": chat("a", "b"), "finished": False}, {"prompt": "q", "response": "r" * 90}]
    report = prepare([write_jsonl(tmp_path / "rows.jsonl", rows)], toys.tokenizer(), tmp_path / "out", max_length=20)
    data = load(tmp_path / "out")
    assert data.column_names == ["id", "input_ids", "loss_mask", "finished"]
    assert data["id"] == ["rows.jsonl:1", "7", "rows.jsonl:3"]
    assert data[0]["loss_mask"] == MASK
    assert data["finished"] == [True, False, False]
    assert [len(ids) for ids in data["input_ids"]] == [len(mask) for mask in data["loss_mask"]] == [14, 5, 20]
    assert (report.rows, report.kept, report.dropped) == (3, {"train": 3}, {})
    assert (report.cut, report.unfinished, report.tokens, report.supervised) == (1, 2, 39, 5 + 1 + 16)
    assert json.loads((tmp_path / "out" / "report.json").read_text())["tokens"] == 39


BAD: list[Any] = [{"conversations": []}, {"messages": chat("q")}, {"messages": chat("q" * 60, "late")}]


def test_rows_without_supervision_are_dropped_and_counted(tmp_path: Path) -> None:
    """Case A10."""
    report = prepare([write_jsonl(tmp_path / "rows", [GOOD, *BAD])], toys.tokenizer(), tmp_path / "out", max_length=40)
    assert report.kept == {"train": 1}
    assert report.dropped == {"no turns": 1, "no answer": 1, "no answer within max_length": 1}
    assert report.refused[0] == "rows:2: the conversation is empty"
    assert all(any(mask) for mask in load(tmp_path / "out")["loss_mask"])


def test_nothing_usable_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows", BAD)
    with pytest.raises(ValueError, match=r"no usable row.*no answer: 1.*rows:1: the conversation is empty"):
        prepare([source], toys.tokenizer(), tmp_path / "out", max_length=40)
    assert files(tmp_path) == ["rows"]


def test_refused_rows_do_not_stop_the_run(tmp_path: Path) -> None:
    """The row is reported with its number and the template's own words."""
    rows = [GOOD, {"system": "s", **GOOD}, {"messages": [{"role": "laguna_s", "content": "x"}]}]
    report = prepare([write_jsonl(tmp_path / "rows", rows)], toys.tokenizer(toys.STRICT), tmp_path / "out")
    assert report.dropped == {"refused by the template": 1, "unknown role": 1}
    assert any("rows:2" in line and "System role not supported" in line for line in report.refused)
    assert any("rows:3" in line and "'laguna_s'" in line for line in report.refused)


def test_file_shapes_give_identical_ids(tmp_path: Path) -> None:
    rows = [GOOD, {"messages": chat("x", "y")}]
    lines = [json.dumps(row) for row in rows]
    shapes = {
        "lines": "\n".join(lines),
        "array": json.dumps(rows),
        "arrays": json.dumps([row["messages"] for row in rows]),
        "bom": "\ufeff" + "\n".join(lines),
        "crlf": "\r\n".join(lines),
        "blank": "\n\n".join(lines) + "\n\n",
    }
    ids = []
    for name, text in shapes.items():
        (tmp_path / name).write_text(text, encoding="utf-8", newline="")
        prepare([tmp_path / name], toys.tokenizer(), tmp_path / f"out-{name}")
        ids.append(load(tmp_path / f"out-{name}")["input_ids"])
    assert all(one == ids[0] for one in ids)


def test_used_again_only_when_nothing_changed(tmp_path: Path) -> None:
    source, out = write_jsonl(tmp_path / "rows", [GOOD]), tmp_path / "out"
    tokenizer = toys.tokenizer()
    first = prepare([source], tokenizer, out)
    assert not first.reused
    tokenizer(
        "x", padding="max_length", max_length=9, truncation=True
    )  # changes the tokenizer's state, not what it does
    again = prepare([source], tokenizer, out)
    assert again.reused
    assert again.tokens == first.tokens
    assert not prepare([source], tokenizer, out, max_length=10).reused
    assert load(out)[0]["loss_mask"] == MASK[:10]
    assert not prepare([source], toys.tokenizer(toys.LINES), out, max_length=10).reused
    assert not prepare([source], toys.tokenizer(toys.LINES, merges=[("a", "a")]), out, max_length=10).reused
    write_jsonl(source, [GOOD, GOOD])
    assert prepare([source], toys.tokenizer(), out, max_length=10).kept == {"train": 2}
    assert files(tmp_path) == ["out", *(f"out/{name}" for name in files(out)), "rows"]


@pytest.mark.parametrize("name", ["notes.txt", "train/notes.txt"])
def test_folders_with_other_things_are_left_alone(tmp_path: Path, name: str) -> None:
    """Case A18, before anything of ours is there and after."""
    source, out = write_jsonl(tmp_path / "rows", [GOOD]), tmp_path / "out"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("mine")
    with pytest.raises(ValueError, match=r"holds (train.)?notes\.txt"):
        prepare([source], toys.tokenizer(), out)
    assert [path for path in files(out) if path != "train"] == [name]
    (out / name).unlink()
    prepare([source], toys.tokenizer(), out)
    (out / name).write_text("mine")
    with pytest.raises(ValueError, match=r"notes\.txt"):
        prepare([source], toys.tokenizer(), out, max_length=10)
    assert (out / name).read_text() == "mine"
    assert load(out)[0]["loss_mask"] == MASK


def test_a_failed_run_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = write_jsonl(tmp_path / "rows", [GOOD]), tmp_path / "out"
    prepare([source], toys.tokenizer(), out)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_save", full)
    with pytest.raises(OSError, match="No space left"):
        prepare([source], toys.tokenizer(), out, max_length=10)
    assert load(out)[0]["loss_mask"] == MASK
    assert sorted(os.listdir(tmp_path)) == ["out", "rows"]


def test_holding_out(tmp_path: Path) -> None:
    rows = [{"messages": chat(f"tell me about thing{i} and its{i} story{i}", "ok")} for i in range(20)]
    source = write_jsonl(tmp_path / "rows", rows)
    report = prepare([source], toys.tokenizer(), tmp_path / "out", heldout=0.25, seed=3)
    assert report.kept == {"train": 15, "heldout": 5}
    assert report.split is not None
    assert 0 < report.split["closest_pair"]["similarity"] < 0.7
    train, heldout = load(tmp_path / "out"), load(tmp_path / "out", "heldout")
    assert sorted([*train["id"], *heldout["id"]]) == sorted(f"rows:{i}" for i in range(1, 21))
    assert not prepare([source], toys.tokenizer(), tmp_path / "out", heldout=0.25, seed=4).reused
    assert load(tmp_path / "out", "heldout")["id"] != heldout["id"]


def test_loading_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="headstart data prepare"):
        load(tmp_path)
    prepare([write_jsonl(tmp_path / "rows", [GOOD])], toys.tokenizer(), tmp_path / "out")
    with pytest.raises(FileNotFoundError, match=r"no split 'heldout' \(it has: train\)"):
        load(tmp_path / "out", "heldout")


def test_bad_arguments(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows", [GOOD])
    with pytest.raises(ValueError, match="no data file was named"):
        prepare([], toys.tokenizer(), tmp_path / "out")
    with pytest.raises(ValueError, match="max_length is 0"):
        prepare([source], toys.tokenizer(), tmp_path / "out", max_length=0)
    with pytest.raises(FileNotFoundError, match="no data file"):
        prepare([tmp_path / "none"], toys.tokenizer(), tmp_path / "out")
    with pytest.raises(ValueError, match="cannot be held out"):
        prepare([source], toys.tokenizer(), tmp_path / "out", heldout=0.5)
    assert files(tmp_path) == ["rows"]
