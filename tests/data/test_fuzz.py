"""Ten thousand mutated rows: nothing crashes, and no turn is lost without a word."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from data.conversation import mend, read_conversation
from data.prepare import load, prepare
from data.render import Rendered, Renderer, sequences
from data.turns import Conversation, Refusal
from tests.data import toys
from tests.data.toys import chat, write_jsonl

ROWS = 10_000
MESSAGES = ("messages", "conversations", "conversation")
JUNK: list[Any] = [None, "", " ", 0, 1.5, True, [], {}, "x", "\ud83d", "[A]", "[E]", "null", ["x"], {"type": "image"}]
ROLES = ["system", "user", "human", "assistant", "gpt", "bard", "tool", "function", "laguna_s", "", None, "USER"]
BASES: list[Any] = [
    {"id": 1, "messages": chat("one", "two", "three", "four")},
    {"conversations": [{"from": "human", "value": "five"}, {"from": "gpt", "value": "six"}], "system": "seven"},
    {"prompt": "eight", "response": "nine"},
    {"instruction": "ten", "input": "eleven", "output": "twelve", "history": [["thirteen", "fourteen"]]},
    {"text": "fifteen sixteen"},
    chat("seventeen", "<think>eighteen</think>nineteen"),
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "twenty"}, {"type": "text", "text": "more"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
            {"role": "tool", "content": "result", "name": "f"},
            {"role": "assistant", "content": "done", "reasoning_content": "because"},
        ],
        "tools": [{"name": "f", "parameters": {}}],
        "finished": False,
    },
]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a row with each of its keys or places."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    for key in keys:
        yield value, key
        yield from places(value[key])


def _drop(random: random.Random, inside: Any, key: Any) -> None:
    del inside[key]


def _junk(random: random.Random, inside: Any, key: Any) -> None:
    inside[key] = copy.deepcopy(random.choice(JUNK))


def _role(random: random.Random, inside: Any, key: Any) -> None:
    if isinstance(inside, dict):
        inside[random.choice(("role", "from"))] = random.choice(ROLES)


def _double(random: random.Random, inside: Any, key: Any) -> None:
    if isinstance(inside, list):
        inside.insert(key, copy.deepcopy(inside[key]))
    else:
        inside[random.choice(("content", "value", "text", "messages", "id", "tools"))] = copy.deepcopy(inside[key])


def _text(random: random.Random, inside: Any, key: Any) -> None:
    if isinstance(inside[key], str):
        at = random.randrange(len(inside[key]) + 1)
        inside[key] = (
            inside[key][:at] + random.choice(("\udc00", "é\u2028", "[A]", "</think>", "\n")) + inside[key][at:]
        )


def _json(random: random.Random, inside: Any, key: Any) -> None:
    inside[key] = json.dumps(inside[key])


MUTATIONS: list[Callable[[random.Random, Any, Any], None]] = [_drop, _junk, _role, _double, _text, _json]


def mutated(seed: int) -> Iterator[Any]:
    rng = random.Random(seed)
    for _ in range(ROWS):
        row = {"row": copy.deepcopy(rng.choice(BASES))}
        for _ in range(rng.randrange(4)):
            found = list(places(row))
            inside, key = rng.choice(found)
            rng.choice(MUTATIONS)(rng, inside, key)
            if "row" not in row:
                row["row"] = None
        yield row["row"]


def turns_in(row: Any) -> int | None:
    """How many turns a row holds, counted without the code under test; None where that is not plain to see."""
    if isinstance(row, list):
        return len(row)
    lists = [row[key] for key in MESSAGES if isinstance(row, dict) and isinstance(row.get(key), list) and row[key]]
    if len(lists) != 1:
        return None
    at_top = row.get("system")
    inside = [message.get("content", message.get("value")) for message in lists[0] if isinstance(message, dict)]
    extra = isinstance(at_top, str) and at_top.strip() != "" and mend(at_top) not in map(mend, inside)
    return len(lists[0]) + extra


def check(row: Any, one: Conversation, made: list[Rendered], tokenizer: Any) -> None:
    expected = turns_in(row)
    if expected is not None and one.text is None:
        assert len(one.turns) + one.orphans == expected, row
    texts = [tokenizer.decode(sequence.ids) for sequence in made]
    assert all(len(sequence.ids) == len(sequence.mask) and any(sequence.mask) for sequence in made), row
    if one.text is not None:
        assert texts == [one.text], row
        return
    for turn in one.turns[: len(one.turns) - made[-1].left_out]:
        said = turn.content.rpartition("</think>")[2] if turn.role == "assistant" else turn.content
        assert any(said.strip() in text for text in texts), (row, turn)
    learned = "".join(
        tokenizer.decode([id for id, bit in zip(sequence.ids, sequence.mask, strict=True) if bit]) for sequence in made
    )
    answers = [turn for turn in one.turns if turn.role == "assistant"]
    assert all(turn.content.rpartition("</think>")[2].strip() in learned for turn in answers), row


def test_mutated_rows_lose_nothing() -> None:
    """Each row is refused with a reason, or all its turns are in its ids and all its answers are learned."""
    renderers = [Renderer(toys.tokenizer(template)) for template in (toys.TOOLS, toys.THINKING)]
    outcomes: Counter[str] = Counter()
    for number, row in enumerate(mutated(7)):
        renderer = renderers[number % 2]
        try:
            one = read_conversation(row, "f:1")
            made = sequences(one, renderer.tokenizer, renderer, None)
        except Refusal as refusal:
            assert str(refusal) and refusal.reason
            outcomes[refusal.reason] += 1
            continue
        check(row, one, made, renderer.tokenizer)
        outcomes["kept"] += 1
    assert sum(outcomes.values()) == ROWS
    assert outcomes["kept"] > ROWS / 4
    assert len(outcomes) > 15, outcomes  # the mutations reach most ways to be refused


def test_mutated_rows_in_a_file(tmp_path: Path) -> None:
    """Every row of a file is in the report, kept or refused with its number; damaged lines among them."""
    rng = random.Random(3)
    lines = [json.dumps(row).encode() for row in list(mutated(11))[:300]]
    lines = [line[: rng.randrange(1, len(line))] + b"\xff" if rng.random() < 0.1 else line for line in lines]
    source = write_jsonl(tmp_path / "rows", [])
    source.write_bytes(b"\r\n".join(lines))
    report = prepare([source], toys.tokenizer(toys.TOOLS), tmp_path / "out", chunk=64)
    assert report.rows == 300 == report.kept["train"] + sum(report.dropped.values())
    assert report.dropped["not JSON"] > 10
    assert len(load(tmp_path / "out")) == report.sequences
