"""The prepared folder: what is in it, when it is used again, and what it never touches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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


def test_one_row_that_the_template_refuses_does_not_stop_the_others(tmp_path: Path) -> None:
    """A leading answer is taken away with a count, never learned as a prompt's."""
    turns = [("gpt", "orphan"), ("human", "q"), ("gpt", "a")]
    rows = [
        {"messages": chat("q", "a")},
        {"messages": [*chat("q"), *chat("again", "a")]},
        {"conversations": [{"from": role, "value": text} for role, text in turns]},
    ]
    source = write_jsonl(tmp_path / "rows", rows)
    report = prepare([source], toys.tokenizer(toys.ALTERNATING), tmp_path / "out")
    assert (report.kept, report.orphans, report.dropped) == ({"train": 2}, 1, {"refused by the template": 1})
    assert report.refused == ["rows:2: the chat template refused the conversation: Conversation roles must alternate"]
    assert load(tmp_path / "out")["input_ids"] == [[260, 80, 262, 261, 64, 262]] * 2
    assert load(tmp_path / "out")["loss_mask"] == [[False] * 4 + [True] * 2] * 2


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
    assert load(out)[0]["loss_mask"] == MASK[:8]
    assert not prepare([source], toys.tokenizer(toys.LINES), out, max_length=10).reused
    assert not prepare([source], toys.tokenizer(toys.LINES, merges=[("a", "a")]), out, max_length=10).reused
    write_jsonl(source, [GOOD, GOOD])
    assert prepare([source], toys.tokenizer(), out, max_length=10).kept == {"train": 2}
    assert files(tmp_path) == ["out", *(f"out/{name}" for name in files(out)), "rows"]


@pytest.mark.parametrize("name", ["notes.txt", "train/notes.txt"])
def test_folders_with_other_things_are_left_alone(tmp_path: Path, name: str) -> None:
    """Before anything of ours is there and after."""
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


@pytest.mark.parametrize("chunk", [1, 2, 1000])
def test_plain_text_keeps_every_row_whatever_the_chunk(tmp_path: Path, chunk: int) -> None:
    source = write_jsonl(tmp_path / "rows", [{"text": f"text {i}"} for i in range(5)])
    report = prepare([source], toys.tokenizer(None), tmp_path / "out", chunk=chunk)
    data = load(tmp_path / "out")
    assert (report.rows, report.kept, len(data)) == (5, {"train": 5}, 5)
    assert [toys.tokenizer().decode(ids) for ids in data["input_ids"]] == [f"text {i}" for i in range(5)]
    assert data["loss_mask"] == [[True] * 6] * 5


def test_a_conversation_in_several_sequences_stays_on_one_side(tmp_path: Path) -> None:
    rows = [{"id": i, "messages": chat(f"thing{i} of{i}", "<think>x</think>a", f"more{i}", "b")} for i in range(6)]
    source = write_jsonl(tmp_path / "rows", rows)
    report = prepare([source], toys.tokenizer(toys.THINKING), tmp_path / "out", heldout=2, chunk=4)
    assert (report.kept, report.sequences) == ({"train": 4, "heldout": 2}, 12)
    sides = [[id.partition("#") for id in load(tmp_path / "out", name)["id"]] for name in ("train", "heldout")]
    assert [len(side) for side in sides] == [8, 4]
    for side in sides:
        assert [(a[0], a[2]) for a in side[::2]] == [(b[0], "1") for b in side[1::2]]


def test_damage_is_refused_by_number_and_the_run_goes_on(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "rows", [GOOD, GOOD])
    source.write_text(source.read_text()[:-9])
    (tmp_path / "none").write_text("")
    report = prepare([source, tmp_path / "none"], toys.tokenizer(), tmp_path / "out")
    assert (report.rows, report.kept) == (2, {"train": 1})
    assert report.dropped == {"not JSON": 1, "empty file": 1}
    assert report.refused[0].startswith("rows:2: not JSON")
    with pytest.raises(ValueError, match=r"no usable row in none .*is empty"):
        prepare([tmp_path / "none"], toys.tokenizer(), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_roles_and_orphans_are_counted_and_part_of_the_key(tmp_path: Path) -> None:
    named = [{"from": "human", "value": "q"}, {"from": "laguna_s", "value": "a"}]
    rows = [{"conversations": [{"from": "gpt", "value": "orphan"}, *chat("q", "a")]}, {"conversations": named}]
    source, out = write_jsonl(tmp_path / "rows", rows), tmp_path / "out"
    report = prepare([source], toys.tokenizer(), out)
    assert (report.kept, report.orphans, report.dropped) == ({"train": 1}, 1, {"unknown role": 1})
    report = prepare([source], toys.tokenizer(), out, roles={"laguna_s": "assistant"})
    assert (report.kept, report.orphans, report.dropped, report.reused) == ({"train": 2}, 1, {}, False)
    assert load(out)["input_ids"] == [[260, 80, 262, 261, 64, 262]] * 2


def test_provenance_says_what_made_it(tmp_path: Path) -> None:
    prepare([write_jsonl(tmp_path / "rows", [GOOD])], toys.tokenizer(), tmp_path / "a" / "b" / "new")
    told = json.loads((tmp_path / "a" / "b" / "new" / "provenance.json").read_text())
    assert set(told["made_with"]) == {"datasets", "tokenizers", "transformers"}
    assert told["key"]["sources"][0]["name"] == "rows"
    assert len(told["key"]["sources"][0]["sha256"]) == 64
