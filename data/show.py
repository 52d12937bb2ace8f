"""A conversation as the target reads it, with the tokens that are learned coloured."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from data.conversation import read_conversation
from data.files import parse
from data.folder import PROVENANCE
from data.render import Renderer, sequences
from data.roles import checked_roles
from data.sources import open_sources
from data.turns import Refusal

COLOURED = ("\x1b[1;32m", "\x1b[0m")
MARKED = ("⟦", "⟧")
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
"""Control characters → their pictures: what a row holds must not steer the terminal."""


@dataclass(frozen=True)
class Shown:
    """A sequence in runs of text, each learned or not; or a row that is refused, with the reason."""

    id: str
    runs: list[tuple[str, bool]]
    tokens: int = 0
    supervised: int = 0
    refused: str | None = None

    def text(self, marks: tuple[str, str]) -> str:
        """For people: a line about it, then its text with ``marks`` around what is learned."""
        if self.refused is not None:
            return f"{self.id}: refused, {self.refused}"
        start, end = marks
        body = "".join(f"{start}{text}{end}" if learned else text for text, learned in self.runs)
        return f"{self.id}: {self.tokens} tokens, {self.supervised} learned\n{body}"


def _shown(tokenizer: Any, id: str, ids: Sequence[int], mask: Sequence[bool]) -> Shown:
    runs = []
    for learned, pairs in groupby(zip(ids, mask, strict=True), key=lambda pair: bool(pair[1])):
        text = tokenizer.decode([token for token, _ in pairs], clean_up_tokenization_spaces=False)
        runs.append((str(text).translate(_VISIBLE), learned))
    return Shown(id, runs, len(ids), sum(map(bool, mask)))


def show(
    sources: Sequence[str | os.PathLike[str]],
    tokenizer: Any,
    *,
    max_length: int | None = None,
    roles: Mapping[str, str] | None = None,
    split: str = "train",
) -> Iterator[Shown]:
    """Sequences of prepared folders (as they are), or of sources (as preparing would make them), one after the other.

    Args:
        sources: as :func:`data.prepare.prepare` takes them, or folders that it made.
        tokenizer: the target's.
        max_length, roles: as for preparing; prepared folders have them in their data.
        split: of prepared folders.
    """
    prepared = [Path(source) for source in sources if (Path(source) / PROVENANCE).is_file() and _made(Path(source))]
    for folder in prepared:
        from data.prepare import load

        for row in load(folder, split):
            yield _shown(tokenizer, row["id"], row["input_ids"], row["loss_mask"])
    others = [source for source in sources if Path(source) not in prepared]
    if not others:
        return
    names = checked_roles(roles or {})
    renderer = Renderer(tokenizer) if tokenizer.chat_template else None
    for source in open_sources(others):
        for number, raw in source.rows():
            where = f"{source.name}:{number}"
            try:
                conversation = read_conversation(parse(raw), where, names)
                made = sequences(conversation, tokenizer, renderer, max_length)
            except Refusal as refusal:
                yield Shown(where, [], refused=str(refusal))
                continue
            for one in made:
                name = conversation.id if one is made[-1] else f"{conversation.id}#{one.last}"
                yield _shown(tokenizer, name, one.ids, one.mask)


def _made(folder: Path) -> bool:
    """Whether it is a prepared folder, and not another that has a provenance file."""
    return any((folder / name / "state.json").is_file() for name in ("train", "heldout"))
