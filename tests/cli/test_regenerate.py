"""``headstart data regenerate --heads``: the same conversations as without heads, from a target and heads on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import headstart
from heads.target import Target
from tests.data.toys import chat, tokenizer, write_jsonl
from tests.heads.small import small_heads
from tests.tiny import tiny_model

VOCAB = 264


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A target, heads of it, heads of another, and questions."""
    for seed, name in enumerate(("target", "other")):
        tiny_model("llama", dtype=torch.float32, vocab=VOCAB, seed=seed).save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
        target = Target.load(str(tmp_path / name), dtype=torch.float32)
        small_heads("medusa", target).save_pretrained(tmp_path / f"{name}-heads")
    rows = [{"id": 1, "messages": chat("hi", "x", "ho", "y")}, {"id": 2, "messages": chat("a longer question")}]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    return tmp_path


def regenerate(folder: Path, out: str, *options: str) -> int:
    words = ["--target", str(folder / "target"), "--out", str(folder / out), "--dtype", "float32"]
    return headstart.main(
        ["data", "regenerate", str(folder / "rows.jsonl"), *words, "--max-answer-tokens", "12", *options]
    )


def test_the_same_text_with_heads_as_without(folder: Path) -> None:
    assert regenerate(folder, "plain") == 0
    assert regenerate(folder, "drafted", "--heads", str(folder / "target-heads")) == 0
    for name in ("conversations.jsonl", "regeneration.json"):
        assert (folder / "plain" / name).read_bytes() == (folder / "drafted" / name).read_bytes()
    rows = [json.loads(line) for line in (folder / "drafted" / "conversations.jsonl").read_text().splitlines()]
    assert [len(row["messages"]) for row in sorted(rows, key=lambda row: row["id"])] in ([2, 2], [4, 2])
    # draws do depend on who drafts, so they are kept apart
    drawn = ("--temperature", "1.0")
    assert regenerate(folder, "draws", *drawn) == 0
    assert regenerate(folder, "draws", *drawn, "--heads", str(folder / "target-heads")) == 2


def test_heads_that_do_not_belong_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert regenerate(folder, "out", "--heads", str(folder / "other-heads")) == 2
    assert "other weights" in capsys.readouterr().err
    assert regenerate(folder, "out", "--heads", str(folder / "target-heads"), "--server", "http://localhost:1/v1") == 2
    assert "error: --heads are for the local engine" in capsys.readouterr().err
    assert not (folder / "out").exists()
