"""The same conversations from every kind of file, from folders, and from the Hub."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import huggingface_hub
import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
import pytest

from data.conversation import read_conversation
from data.files import parse
from data.prepare import load, prepare
from data.sources import open_sources
from data.turns import Refusal
from tests.data import toys
from tests.data.toys import chat, write_jsonl

ROWS = [{"id": "a", "messages": chat("hi", "ok")}, {"id": "b", "messages": chat("x", "y", "é", "z")}]


def turns(*names: Any) -> list[tuple[str, Any]]:
    """Where each row stands, and its turns or the reason that it is refused."""
    found: list[tuple[str, Any]] = []
    for source in open_sources(names):
        for number, raw in source.rows():
            try:
                one = read_conversation(parse(raw), "")
                found.append((f"{source.name}:{number}", [turn.content for turn in one.turns]))
            except Refusal as refusal:
                found.append((f"{source.name}:{number}", refusal.reason))
    return found


def as_parquet(path: Path) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path


def as_csv(path: Path, delimiter: str = ",") -> Path:
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(["id", "messages"])
        writer.writerows([row["id"], json.dumps(row["messages"])] for row in ROWS)
    return path


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: write_jsonl(folder / "rows", ROWS),
        lambda folder: as_parquet(folder / "rows.parquet"),
        lambda folder: as_csv(folder / "rows.csv"),
        lambda folder: as_csv(folder / "rows.tsv", "\t"),
    ],
)
def test_every_kind_of_file(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    path = make(tmp_path)
    wanted = [(f"{path.name}:1", ["hi", "ok"]), (f"{path.name}:2", ["x", "y", "é", "z"])]
    assert turns(path) == wanted
    assert open_sources([path])[0].bytes == path.stat().st_size


def test_a_packed_table(tmp_path: Path) -> None:
    plain = as_csv(tmp_path / "rows.csv")
    packed = tmp_path / "packed.csv.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert [row for _, row in turns(packed)] == [row for _, row in turns(plain)]
    packed.write_bytes(packed.read_bytes()[:-12])
    assert turns(packed)[-1][1] == "damaged file"


def test_tables_of_pairs_and_their_damage(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('prompt,response\nq,"a\nb"\nonly one\nq,a,more\n"q"x,a\nr,b\n')
    assert turns(path) == [
        ("rows.csv:1", ["q", "a\nb"]),
        ("rows.csv:2", "damaged row"),
        ("rows.csv:3", "damaged row"),
        ("rows.csv:4", "damaged row"),
        ("rows.csv:5", ["r", "b"]),
    ]
    path.write_text("prompt,response\n")
    assert turns(path) == [("rows.csv:0", "empty file")]
    broken = tmp_path / "rows.parquet"
    broken.write_bytes(b"PAR1 and then nothing")
    assert turns(broken) == [("rows.parquet:1", "damaged file")]


def test_a_folder_is_its_data_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    write_jsonl(tmp_path / "part" / "b.jsonl", ROWS[1:])
    as_parquet(tmp_path / "a.parquet")
    for name in ("notes.txt", "provenance.json", ".hidden.jsonl", "README.md"):
        (tmp_path / name).write_text("no row")
    assert [where for where, _ in turns(tmp_path)] == ["a.parquet:1", "a.parquet:2", "part/b.jsonl:1"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no data file in the folder"):
        open_sources([tmp_path / "empty"])


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "rows.jsonl", ROWS[:1])
    names = [tmp_path / name / "rows.jsonl" for name in ("one", "two")]
    assert [where for where, _ in turns(*names)] == [f"{name}:1" for name in names]
    assert [where for where, _ in turns(tmp_path / "one", tmp_path / "two")] == ["one/rows.jsonl:1", "two/rows.jsonl:1"]


def test_a_saved_dataset(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    assert [row for _, row in turns(tmp_path / "saved")] == [["hi", "ok"], ["x", "y", "é", "z"]]


def test_calls_are_the_same_from_lines_and_from_arrow(tmp_path: Path) -> None:
    """Arrow makes missing keys null; no null and no None is rendered, and the ids are the same."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    texts = [{"x": 1}, '{"x": 1}', "null"]
    rows: list[dict[str, Any]] = [
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]},
                {"role": "tool", "content": "42", "name": "f"},
                {"role": "assistant", "content": "ok"},
            ]
        }
        for arguments in texts
    ]
    rows.append({"messages": [*chat("hi"), {"role": "assistant", "content": "", "tool_calls": [call]}], "tools": None})
    rows[0]["tools"] = [{"name": "f", "parameters": {"properties": {"x": {"type": "string"}}}}]
    as_text = json.loads(json.dumps(rows))
    as_objects = [rows[0], rows[3]]
    for row in as_text:  # a column of Arrow has one type
        for message in row["messages"]:
            for made in message.get("tool_calls", []):
                given = made["function"]["arguments"]
                made["function"]["arguments"] = given if isinstance(given, str) else json.dumps(given)
    tokenizer = toys.tokenizer(toys.TOOLS)
    for name, some in (("text", as_text), ("objects", as_objects)):
        lines = write_jsonl(tmp_path / f"{name}.jsonl", some)
        table = tmp_path / f"{name}.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(some), table)
        assert "None" in str(pyarrow.parquet.read_table(table).to_pylist())
        made_of = {}
        for path in (lines, table):
            prepare([path], tokenizer, tmp_path / f"out-{path.name}")
            data = load(tmp_path / f"out-{path.name}")
            made_of[path.suffix] = (data["input_ids"], data["loss_mask"])
        assert made_of[".jsonl"] == made_of[".parquet"]
        read = [tokenizer.decode(ids) for ids in made_of[".jsonl"][0]]
        assert not any(word in text for text in read for word in ("None", "null"))
    shown = [tokenizer.decode(ids) for ids in load(tmp_path / "out-text.jsonl")["input_ids"]]
    assert shown[1] == '[U]hi[E][A]f({"x": 1})[E][U]tool:42[E][A]ok[E]'
    assert shown[2] == "[U]hi[E][A]f({})[E][U]tool:42[E][A]ok[E]"
    assert shown[0].startswith('[S][{"type": "function", "function": {"name": "f"')
    mask = load(tmp_path / "out-text.jsonl")["loss_mask"][2]
    assert [int(bit) for bit in mask] == [0] * 5 + [1] * 6 + [0] * 10 + [1] * 3


def test_a_data_set_on_the_hub_is_read_at_one_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    class Info:
        sha = "c0ffee"

    def info(self: object, name: str, revision: str | None = None) -> Info:
        asked.append((name, revision))
        return Info()

    def rows(*args: Any, **options: Any) -> Any:
        asked.append((args, options))
        return datasets.IterableDataset.from_generator(lambda: iter(ROWS))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    monkeypatch.setattr(datasets, "load_dataset", rows)
    assert [row for _, row in turns("org/chats:train_sft")] == [["hi", "ok"], ["x", "y", "é", "z"]]
    assert asked == [
        ("org/chats", None),
        (("org/chats", None), {"split": "train_sft", "revision": "c0ffee", "streaming": True}),
    ]
    (source,) = open_sources(["org/chats/small@v2"])
    assert source.content == {"name": "org/chats", "config": "small", "split": "train", "commit": "c0ffee"}
    assert asked[-1] == ("org/chats", "v2")


def test_what_is_nowhere_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="no data file runs/none, and no data set of that name on the Hub"):
        open_sources(["runs/none"])
    for name in ("runs/none.jsonl", "none", str(tmp_path / "none")):
        with pytest.raises(FileNotFoundError, match="no data file") as caught:
            open_sources([name])
        assert "Hub" not in str(caught.value)


def test_saved_data_sets_that_cannot_be_read(tmp_path: Path) -> None:
    saved = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(
        ValueError, match=r"both holds several saved data sets: name the folder of one in it \(test, tr"
    ):
        open_sources([tmp_path / "both"])
    assert len(list(open_sources([tmp_path / "both" / "test"])[0].rows())) == len(ROWS)
    (arrow,) = (tmp_path / "both" / "test").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"the data set saved in .*test is damaged \(.*save it again"):
        list(open_sources([tmp_path / "both" / "test"])[0].rows())
