"""Prompts to measure on: one JSON object a line, in the shapes people have them in, and some that are built in."""

from __future__ import annotations

import gzip
import json
import zlib
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
        if not isinstance(turn["content"], str):
            raise ValueError(f"the content of a turn is no text but a {type(turn['content']).__name__}")
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
        path: the file, or one of :data:`BUILTIN`. ``category`` (or ``task``) and ``question_id`` (or ``id``) are kept
            where a row has them.
        per_category: keep the first so many of each category.
        limit: keep the first so many of what is left.

    Raises:
        OSError: no such file.
        ValueError: a line that is no prompt, with its number; or no prompt at all.
    """
    found: list[Prompt] = []
    counts: dict[str, int] = {}
    for number, row in BUILTIN[str(path)]() if str(path) in BUILTIN else _rows(Path(path)):
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


def _lines(path: Path) -> Iterator[str]:
    try:
        with (
            gzip.open(path, "rt", encoding="utf-8-sig")
            if path.suffix == ".gz"
            else path.open(encoding="utf-8-sig") as file
        ):
            yield from file
    except (EOFError, zlib.error, UnicodeDecodeError) as problem:
        raise ValueError(f"{path} is cut short, or no text in UTF-8 ({problem})") from None


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as wrong:
                raise ValueError(f"{path}, line {number} is no JSON: {wrong}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number} is no JSON object")
            yield number, row


def _json_extraction() -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Twenty made-up records of a shop with the fields to copy out of each: text that a lookup can draft."""
    made = zip(ITEMS, CITIES * 4, PEOPLE * 4, strict=True)
    for number, (item, city, person) in enumerate(made, 1):
        product, colour, price = item
        code, count = f"{product[:2].upper()}-{1000 + 37 * number}", 1 + number % 7
        if number % 2:
            record = (
                f"Order {code} was placed by {person} on 2024-{1 + number % 12:02d}-{1 + number:02d}. It holds {count} "
                f"pieces of the {colour} {product} at {price} euros each and goes to {number} Market Street in {city}."
            )
            fields = "order, customer, date, item, colour, quantity, price, street, city"
        else:
            record = (
                f"The {product} (article {code}) comes in {colour}, costs {price} euros and weighs "
                f"{count}.{number % 10} kg. It is made in {city}; questions go to {person}, "
                f"{person.split()[0].lower()}@shop.example."
            )
            fields = "article, name, colour, price, weight, origin, contact, email"
        ask = f"Extract these fields from the record as JSON and write nothing else: {fields}."
        yield number, {"prompt": f"{ask}\n\nRecord:\n{record}", "category": "json extraction", "id": f"json {number}"}


ITEMS = (
    ("desk lamp", "green", "39.90"),
    ("rain jacket", "dark blue", "84.00"),
    ("tea kettle", "copper", "27.50"),
    ("wall clock", "white", "19.95"),
    ("garden chair", "oak brown", "112.00"),
    ("travel bag", "grey", "58.40"),
    ("steel bottle", "silver", "16.20"),
    ("wool blanket", "cream", "49.00"),
    ("bread knife", "black", "23.75"),
    ("bike helmet", "yellow", "64.99"),
    ("table fan", "light grey", "31.00"),
    ("picture frame", "walnut", "12.80"),
    ("camping stove", "red", "45.60"),
    ("office chair", "black", "179.00"),
    ("yoga mat", "violet", "22.30"),
    ("coffee grinder", "matt black", "71.25"),
    ("snow boots", "brown", "95.50"),
    ("book shelf", "white", "139.00"),
    ("head torch", "orange", "34.10"),
    ("soup bowl", "turquoise", "9.90"),
)
CITIES = ("Lisbon", "Utrecht", "Graz", "Tampere", "Leeds")
PEOPLE = ("Maria Lindgren", "Tomas Okafor", "Ana Petrov", "Jonas Weber", "Leila Haddad")

# names that stand for a file → its rows
BUILTIN: dict[str, Callable[[], Iterator[tuple[int, Mapping[str, Any]]]]] = {"builtin:json": _json_extraction}
