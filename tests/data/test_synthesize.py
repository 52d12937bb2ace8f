"""Synthesis with an engine that says what it is told to: resuming, duplicates, unfinished turns, sharing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from data.completer import Completion
from data.files import read_rows
from data.render import Renderer
from data.share import share
from data.synthesize import (
    ANSWERS,
    PROMPTS,
    SynthesisReport,
    SynthesisSettings,
    answer_prompt,
    synthesize,
    user_header,
)
from data.turns import Turn
from tests.data import toys

SETTINGS = SynthesisSettings("toy", conversations=5, chunk=4, max_answer_tokens=9)


@dataclass
class Script:
    """Draws prompts from a list over and over, answers each in capitals; counts calls and can break at one."""

    tokenizer: Any
    prompts: Sequence[tuple[str, bool]]
    breaks_at: int = -1
    calls: list[int] = field(default_factory=list)

    def complete(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, temperature: float = 0.0, seed: int = 0
    ) -> list[Completion]:
        if len(self.calls) == self.breaks_at:
            raise KeyboardInterrupt
        self.calls.append(len(prompts))
        if temperature:
            at = seed * len(prompts)
            said = [self.prompts[(at + i) % len(self.prompts)] for i in range(len(prompts))]
        else:
            asked = [self.tokenizer.decode(ids).removeprefix("[U]").removesuffix("[E][A]") for ids in prompts]
            said = [(text.upper()[:max_new_tokens], len(text) <= max_new_tokens) for text in asked]
        return [Completion(self.tokenizer(text, add_special_tokens=False).input_ids, ended) for text, ended in said]


PROMPTS_DRAWN = [("red", True), ("  Red ", True), ("", True), ("a[E]b", True), ("cut", False)] + [
    (f"colour {i}{'!' * i}", True) for i in range(6)
]


def run(folder: Path, **options: Any) -> tuple[Script, SynthesisReport]:
    engine = Script(tokenizer := toys.tokenizer(), PROMPTS_DRAWN, **options)
    return engine, synthesize(engine, tokenizer, folder, SETTINGS)


def test_headers() -> None:
    tokenizer = toys.tokenizer()
    assert tokenizer.decode(user_header(tokenizer)) == "[U]"
    assert tokenizer.decode(answer_prompt(tokenizer, "hi")) == "[U]hi[E][A]"
    with pytest.raises(ValueError, match="no chat template"):
        user_header(toys.tokenizer(None))


def test_rows_and_counts(tmp_path: Path) -> None:
    _, report = run(tmp_path / "out")
    rows = [row for _, row in read_rows(tmp_path / "out" / ANSWERS)]
    assert [row["messages"][0]["content"] for row in rows] == [
        "red",
        "colour 0",
        "colour 1!",
        "colour 2!!",
        "colour 3!!!",
    ]
    assert [row["messages"][1]["content"] for row in rows] == ["RED", "COLOUR 0", "COLOUR 1!", "COLOUR 2!", "COLOUR 3!"]
    assert [row["finished"] for row in rows] == [True, True, True, False, False]
    assert (report.conversations, report.finished, report.answer_tokens) == (5, 3, 3 + 8 + 9 * 3)
    assert report.prompts_sampled == 12
    assert report.prompts_dropped == {"duplicate": 2, "empty": 1, "special token": 1, "unfinished": 1}


@pytest.mark.parametrize("breaks_at", [0, 1, 2, 3, 4])
def test_resuming_repeats_nothing(tmp_path: Path, breaks_at: int) -> None:
    whole, report = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out", breaks_at=breaks_at)
    if (tmp_path / "out" / ANSWERS).exists():  # as a killed process leaves it
        with (tmp_path / "out" / ANSWERS).open("a") as file:
            file.write('{"id": 99, "mess')
    rest, again = run(tmp_path / "out")
    assert (tmp_path / "out" / ANSWERS).read_bytes() == (tmp_path / "whole" / ANSWERS).read_bytes()
    assert (tmp_path / "out" / PROMPTS).read_bytes() == (tmp_path / "whole" / PROMPTS).read_bytes()
    assert again == report
    assert breaks_at + len(rest.calls) == len(whole.calls)


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not made by synthesis"):
        run(tmp_path)
    run(tmp_path / "out")
    tokenizer = toys.tokenizer()
    with pytest.raises(ValueError, match=r"other settings \(seed=0\)"):
        synthesize(
            Script(tokenizer, PROMPTS_DRAWN), tokenizer, tmp_path / "out", SynthesisSettings("toy", 5, 1, 0.9, 48, 9, 4)
        )


def test_an_engine_that_writes_no_prompt_is_an_error(tmp_path: Path) -> None:
    tokenizer = toys.tokenizer()
    with pytest.raises(ValueError, match="none usable"):
        synthesize(Script(tokenizer, [("x", False)]), tokenizer, tmp_path / "out", SETTINGS)


def test_sharing(tmp_path: Path) -> None:
    """Split and compressed; answers that do not read back as what was written are dropped."""
    folder = tmp_path / "out"
    _, made = run(folder)
    odd = [("x\ufffd", 2), ("cut", 3), ("", 0), ("a[A]b", 3), ("two tokens were one", 18)]
    with (folder / ANSWERS).open("a", encoding="utf-8") as file:
        for i, (text, tokens) in enumerate(odd):
            messages = toys.chat(f"odd number{i} here{i}", text)
            row = {"id": 10 + i, "messages": messages, "finished": False, "answer_tokens": tokens}
            file.write(json.dumps(row) + "\n")
    engine = {"dtype": "float32", "batch_size": 4}
    reports = [
        share(folder / ANSWERS, tmp_path / name, toys.tokenizer(), SETTINGS, made, heldout=2, engine=engine)
        for name in ("one", "two")
    ]
    assert reports[0] == reports[1]
    reasons = ("empty answer", "not text", "special token in the answer", "reads back as other tokens")
    assert reports[0].dropped == dict.fromkeys(reasons, 1)
    assert (reports[0].train, reports[0].heldout, reports[0].unfinished) == (4, 2, 3)
    names = ["README.md", "heldout.jsonl.gz", "provenance.json", "train.jsonl.gz"]
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == names
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    rows = {row["id"]: row for name in names if name.endswith(".gz") for _, row in read_rows(tmp_path / "one" / name)}
    assert sorted(rows) == ["000000", "000001", "000002", "000003", "000004", "000011"]
    assert rows["000011"] == {"id": "000011", "messages": toys.chat("odd number1 here1", "cut"), "finished": False}
    readme = (tmp_path / "one" / "README.md").read_text()
    assert "--heldout 2" in readme
    assert "4 conversations" in readme


def test_rendering_starts_from_the_prompt_that_was_answered() -> None:
    """What is trained on is what the engine saw: prompt ids, then answer ids."""
    tokenizer = toys.tokenizer(toys.LINES)
    (rendered,) = Renderer(tokenizer).render([Turn("user", "hi"), Turn("assistant", "ok")])
    assert rendered.ids[: rendered.mask.index(True)] == answer_prompt(tokenizer, "hi")


def test_prompts_stay_apart_from_a_held_out_set(tmp_path: Path) -> None:
    tokenizer = toys.tokenizer(toys.NOGEN)
    drawn = [("paint the old fence green", True), ("count the birds", True), ("boil an egg", True)]
    settings = SynthesisSettings("toy", conversations=2, chunk=3, apart_from=("paint the old green fence",))
    report = synthesize(Script(tokenizer, drawn), tokenizer, tmp_path, settings)
    assert report.prompts_dropped["alike to one to stay apart from"] == 1
    asked = [row["messages"][0]["content"] for _, row in read_rows(tmp_path / ANSWERS)]
    assert asked == ["count the birds", "boil an egg"]
    with pytest.raises(ValueError):  # begun with other settings
        synthesize(Script(tokenizer, drawn), tokenizer, tmp_path, SynthesisSettings("toy", conversations=2, chunk=3))
