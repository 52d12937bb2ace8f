"""Prompts to measure on: one JSON object a line, in the shapes people have them in."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Prompt:
    """What is asked: chat messages that end with the user's turn, under an id and a category to report by."""

    id: str
    category: str
    messages: Messages

    def encode(self, tokenizer: Any) -> Tensor:
        """Token ids (1, n) with the header of the answer; a tokenizer without a chat template gets the bare text."""
        if getattr(tokenizer, "chat_template", None):
            text = tokenizer.apply_chat_template(self.messages, tokenize=False, add_generation_prompt=True)
            return torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        return torch.tensor([tokenizer("\n\n".join(m["content"] for m in self.messages))["input_ids"]])


def _from_messages(row: Mapping[str, Any]) -> Messages:
    """The turns before the first answer, which is the target's own to give."""
    turns: Messages = []
    for turn in row["messages"]:
        if turn["role"] == "assistant":
            break
        turns.append({"role": turn["role"], "content": turn["content"]})
    if not turns or turns[-1]["role"] != "user":
        raise ValueError("its messages have no user turn before the first answer")
    return turns


def _said(text: Any) -> Messages:
    if not isinstance(text, str) or not text.strip():
        raise ValueError("its prompt is no text")
    return [{"role": "user", "content": text}]


SHAPES: dict[str, Callable[[Mapping[str, Any]], Messages]] = {
    "messages": _from_messages,
    "prompt": lambda row: _said(row["prompt"]),
    "turns": lambda row: _said(row["turns"][0]),  # Spec-Bench: later turns need an answer to the first
}


def read_prompts(path: str | Path, *, per_category: int | None = None, limit: int | None = None) -> list[Prompt]:
    """Read a ``.jsonl`` or ``.jsonl.gz`` file of rows with ``messages``, ``prompt`` or ``turns``.

    Args:
        path: the file. ``category`` (or ``task``) and ``question_id`` (or ``id``) are kept where a row has them.
        per_category: keep the first so many of each category.
        limit: keep the first so many of what is left.

    Raises:
        OSError: no such file.
        ValueError: a line that is no prompt, with its number; or no prompt at all.
    """
    path = Path(path)
    found: list[Prompt] = []
    counts: dict[str, int] = {}
    for number, row in _rows(path):
        shape = next((name for name in SHAPES if name in row), None)
        if shape is None:
            raise ValueError(
                f"{path}, line {number}: a prompt needs one of {', '.join(SHAPES)}; this row has {', '.join(row)}"
            )
        try:
            messages = SHAPES[shape](row)
        except (ValueError, KeyError, IndexError, TypeError) as wrong:
            raise ValueError(f"{path}, line {number}: {wrong}") from None
        category = str(row.get("category") or row.get("task") or "all")
        counts[category] = counts.get(category, 0) + 1
        if per_category is None or counts[category] <= per_category:
            found.append(Prompt(str(row.get("question_id", row.get("id", number))), category, messages))
    if not found:
        raise ValueError(f"{path} holds no prompt")
    return found[:limit]


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with (
        gzip.open(path, "rt", encoding="utf-8-sig") if path.suffix == ".gz" else path.open(encoding="utf-8-sig") as file
    ):
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as wrong:
                raise ValueError(f"{path}, line {number} is no JSON: {wrong}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number} is no JSON object")
            yield number, row
