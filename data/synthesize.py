"""Conversations out of nothing: the target writes the user's prompts, then answers them greedily.

The idea of sampling prompts from a chat model by feeding its template up to the user's turn is Magpie's
(arXiv 2406.08464). Answers are greedy because heads learn what the target will say when it is decoded.

Two files grow in the output folder, prompts first: a run that stops goes on where it was, chunk by chunk.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data.completer import Completer
from data.journal import append, claim, read_journal
from data.overlap import Index

Progress = Callable[[str, int, int], None]
"""Told the stage, how much of it is done, and of how much (0: unknown)."""

PROMPTS, ANSWERS, SETTINGS = "prompts.jsonl", "conversations.jsonl", "synthesis.json"


KEYS = ("id", "messages", "finished", "answer_tokens")
"""Of every row of the answers."""


@dataclass(frozen=True)
class SynthesisSettings:
    """What determines the result; a folder made with other settings is never continued."""

    target: str
    conversations: int = 1500
    seed: int = 0
    prompt_temperature: float = 0.9
    max_prompt_tokens: int = 48
    max_answer_tokens: int = 160
    chunk: int = 128
    apart_from: tuple[str, ...] = ()  # prompts, of a held-out set say, that none written may be alike to

    def key(self) -> dict[str, Any]:
        """What a folder remembers them by; the prompts to stay apart from as a hash."""
        told = asdict(self)
        apart = told.pop("apart_from")
        return told | {"apart_from": hashlib.sha256("\0".join(apart).encode()).hexdigest() if apart else None}


@dataclass
class SynthesisReport:
    """What came out, in counts."""

    conversations: int
    finished: int
    answer_tokens: int
    prompts_sampled: int
    prompts_dropped: dict[str, int]


def user_header(tokenizer: Any) -> list[int]:
    """Ids of the chat template up to where a first user message's text begins.

    Raises:
        ValueError: the tokenizer has no chat template, or the text of a message cannot be found in its rendering.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"the tokenizer {tokenizer.name_or_path!r} has no chat template: it cannot draw prompts")
    probe = "\u2063probe\u2063"
    text = tokenizer.apply_chat_template([{"role": "user", "content": probe}], tokenize=False)
    if probe not in text:
        raise ValueError(f"the chat template of {tokenizer.name_or_path!r} does not show a user message's text")
    return list(tokenizer(text[: text.index(probe)], add_special_tokens=False).input_ids)


def answer_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """Ids of one user message with the header of the answer behind it."""
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def synthesize(
    completer: Completer,
    tokenizer: Any,
    folder: str | os.PathLike[str],
    settings: SynthesisSettings,
    progress: Progress = lambda stage, done, total: None,
) -> SynthesisReport:
    """Write ``settings.conversations`` conversations of the target's own to ``folder/conversations.jsonl``.

    Each row has ``id``, ``messages`` and ``finished`` (false: the answer was cut at the limit and carries no
    end-of-turn token). Prompts that did not end, are empty, repeat one already there, hold a template's special token
    or are alike to one of ``settings.apart_from`` (the rule of :mod:`data.overlap`) are dropped and counted.

    Raises:
        ValueError: the folder holds something else, or was begun with other settings.
    """
    folder = Path(folder)
    claim(folder, SETTINGS, "synthesis", settings.key(), may_change=("conversations",))
    prompts, dropped, sampled = _prompts(completer, tokenizer, folder, settings, progress)
    rows = [row for row in read_journal(folder / ANSWERS, *KEYS) if row["id"] < settings.conversations]
    have = {row["id"] for row in rows}
    todo = [(i, p) for i, p in enumerate(prompts) if i not in have]
    for at in range(0, len(todo), settings.chunk):
        part = todo[at : at + settings.chunk]
        answers = completer.complete(
            [answer_prompt(tokenizer, p) for _, p in part], max_new_tokens=settings.max_answer_tokens
        )
        new = [
            {
                "id": i,
                "messages": [
                    {"role": "user", "content": prompt},
                    {"role": "assistant", "content": tokenizer.decode(answer.ids, skip_special_tokens=False)},
                ],
                "finished": answer.finished,
                "answer_tokens": len(answer.ids),
            }
            for (i, prompt), answer in zip(part, answers, strict=True)
        ]
        append(folder / ANSWERS, new)
        rows += new
        progress("answers", len(rows), len(prompts))
    return SynthesisReport(
        conversations=len(rows),
        finished=sum(row["finished"] for row in rows),
        answer_tokens=sum(row["answer_tokens"] for row in rows),
        prompts_sampled=sampled,
        prompts_dropped=dict(dropped),
    )


def _prompts(
    completer: Completer, tokenizer: Any, folder: Path, settings: SynthesisSettings, progress: Progress
) -> tuple[list[str], Counter[str], int]:
    """The first ``settings.conversations`` usable prompts, drawing more chunks until there are enough."""
    header = user_header(tokenizer)
    special = [t for t in tokenizer.all_special_tokens if t]
    chunks = read_journal(folder / PROMPTS, "prompts")
    prompts: list[str] = []
    seen: set[str] = set()
    dropped: Counter[str] = Counter()
    apart = Index(settings.apart_from) if settings.apart_from else None

    def take(chunk: dict[str, Any]) -> None:
        for text, finished in chunk["prompts"]:
            reason = _refuse(text, finished, seen, special)
            if reason is None and apart is not None and apart.close(text):
                reason = "alike to one to stay apart from"
            if reason:
                dropped[reason] += 1
            else:
                seen.add(_key(text))
                prompts.append(text.strip())

    for chunk in chunks:
        take(chunk)
    for index in _from(len(chunks)):
        if len(prompts) >= settings.conversations:
            break
        drawn = completer.complete(
            [header] * settings.chunk,
            max_new_tokens=settings.max_prompt_tokens,
            temperature=settings.prompt_temperature,
            seed=settings.seed * 1_000_003 + index,
        )
        texts = [tokenizer.decode(d.ids, skip_special_tokens=False) for d in drawn]
        chunk = {"chunk": index, "prompts": [[text, d.finished] for text, d in zip(texts, drawn, strict=True)]}
        append(folder / PROMPTS, [chunk])
        chunks.append(chunk)
        take(chunk)
        if index > 20 and not prompts:
            drawn_count = len(chunks) * settings.chunk
            raise ValueError(f"{drawn_count} prompts drawn and none usable ({dict(dropped)}): is this a chat model?")
        progress("prompts", min(len(prompts), settings.conversations), settings.conversations)
    return prompts[: settings.conversations], dropped, len(chunks) * settings.chunk


def _from(start: int) -> Iterator[int]:
    while True:
        yield start
        start += 1


def _key(text: str) -> str:
    """Two prompts that differ only in case and spacing are one."""
    return " ".join(text.lower().split())


def _refuse(text: str, finished: bool, seen: set[str], special: list[str]) -> str | None:
    """Why a drawn prompt is not used, or None."""
    if not finished:
        return "unfinished"
    if not text.strip():
        return "empty"
    if any(token in text for token in special):
        return "special token"
    if _key(text) in seen:
        return "duplicate"
    return None
