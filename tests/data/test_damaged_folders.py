"""Folders of earlier runs whose own records are damaged, or somebody else's: one clear message, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.journal import claim, read_journal
from data.local import LocalAnswerer
from data.prepare import load, prepare
from data.regenerate import JOURNAL, SETTINGS, regenerate
from tests.data import toys
from tests.data.test_prepare import GOOD, MASK
from tests.data.test_regenerate import ROWS, Shouting
from tests.data.test_regenerate import SETTINGS as SAID
from tests.data.toys import write_jsonl

BROKEN = {"cut": '{"settings": ', "a list": "[]", "bytes": "\udcff"}


def spoil(path: Path, how: str) -> bytes:
    """What stands there then."""
    path.write_text(BROKEN[how], errors="surrogateescape")
    return path.read_bytes()


@pytest.mark.parametrize("how", BROKEN)
def test_a_data_set_with_a_damaged_provenance_is_left_alone(tmp_path: Path, how: str) -> None:
    source, out = write_jsonl(tmp_path / "rows", [GOOD]), tmp_path / "out"
    prepare([source], toys.tokenizer(), out)
    left = spoil(out / "provenance.json", how)
    with pytest.raises(ValueError, match=r"out.provenance\.json is damaged \(.*name another folder"):
        prepare([source], toys.tokenizer(), out, max_length=9)
    assert (out / "provenance.json").read_bytes() == left and (out / "report.json").is_file()


@pytest.mark.parametrize("how", [*BROKEN, "of another version", "none"])
def test_a_data_set_with_a_damaged_report_is_made_anew(tmp_path: Path, how: str) -> None:
    source, out = write_jsonl(tmp_path / "rows", [GOOD]), tmp_path / "out"
    first = prepare([source], toys.tokenizer(), out)
    if how == "none":
        (out / "report.json").unlink()
    elif how == "of another version":
        (out / "report.json").write_text('{"rows": 1, "sides": 3}')
    else:
        spoil(out / "report.json", how)
    again = prepare([source], toys.tokenizer(), out)
    assert not again.reused and again == first and load(out)[0]["loss_mask"] == MASK
    assert prepare([source], toys.tokenizer(), out).reused


def test_a_folder_of_somebody_is_not_looked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file that is not ours is enough: it may be a whole disk."""
    source, out = write_jsonl(tmp_path / "rows", [GOOD]), tmp_path / "out"
    for name in ("a/notes.txt", "b/more.txt", "c.txt"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("mine")
    monkeypatch.setattr("data.folder._names", lambda folder: pytest.fail("all of it was listed"))
    with pytest.raises(ValueError, match=r"out holds c\.txt, which preparing did not write"):
        prepare([source], toys.tokenizer(), out)
    (out / "c.txt").unlink()
    with pytest.raises(ValueError, match=r"out holds a.notes\.txt, which preparing did not write"):
        prepare([source], toys.tokenizer(), out)


def test_the_folder_one_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "rows", [GOOD])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    prepare([source], toys.tokenizer(), ".")
    assert load(tmp_path / "here")[0]["loss_mask"] == MASK
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"holds .*, which preparing did not write"):
        prepare([source], toys.tokenizer(), ".")


def again(folder: Path) -> None:
    answerer = LocalAnswerer(Shouting(toys.tokenizer()), toys.tokenizer(), 6)
    regenerate([write_jsonl(folder / "rows", ROWS)], answerer, folder / "out", SAID)


@pytest.mark.parametrize("how", BROKEN)
def test_damaged_settings_of_a_regeneration(tmp_path: Path, how: str) -> None:
    again(tmp_path)
    journal = (tmp_path / "out" / JOURNAL).read_bytes()
    spoil(tmp_path / "out" / SETTINGS, how)
    with pytest.raises(ValueError, match=r"regeneration\.json is damaged \(.*name another folder"):
        again(tmp_path)
    assert (tmp_path / "out" / JOURNAL).read_bytes() == journal
    (tmp_path / "out" / SETTINGS).write_text("{}")
    with pytest.raises(ValueError, match=r"regeneration\.json has no settings, so it was not made by regeneration"):
        again(tmp_path)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="file is a file: name a folder"):
        claim(tmp_path / "file", SETTINGS, "regeneration", SAID)


@pytest.mark.parametrize("line", ["{", "[]", '{"id": 1}', "\0\0\0"])
def test_a_journal_with_a_line_that_is_none_of_ours(tmp_path: Path, line: str) -> None:
    again(tmp_path)
    path = tmp_path / "out" / JOURNAL
    written = path.read_text().splitlines(keepends=True)
    path.write_text("".join([written[0], f"{line}\n", *written[1:]]))
    left = path.read_bytes()
    with pytest.raises(ValueError, match=r"journal\.jsonl, line 2: no row that was written here"):
        again(tmp_path)
    assert path.read_bytes() == left
    path.write_text("".join(written) + line)  # half-written by a killed run
    assert len(read_journal(path, "key")) == 3 and path.read_text() == "".join(written)
