"""Synthesized conversations → files to train on and to share: split, compressed, with where they come from.

OUT/train.jsonl.gz, OUT/heldout.jsonl.gz    rows of id, messages, finished
OUT/provenance.json, OUT/README.md          target, settings, counts, the closest pair across the split
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data.conversation import read_conversation
from data.files import read_rows, write_rows, write_text
from data.split import split
from data.synthesize import SynthesisReport, SynthesisSettings

_LOST = "\ufffd"
"""What stands for bytes that are no text: a character cut in two at the limit, or nonsense of the model's."""


@dataclass(frozen=True)
class ShareReport:
    """What was written, in counts; ``split`` holds the closest pair across the split."""

    train: int
    heldout: int
    unfinished: int
    dropped: dict[str, int]
    split: dict[str, Any]
    bytes: int


def _refuse(row: Mapping[str, Any], tokenizer: Any) -> str | None:
    """Why a row is not shared, or None.

    An answer must read back as the tokens that were written, or heads would learn from tokens that the target does
    not say; their number is what is compared.
    """
    asked, answered = (message["content"] for message in row["messages"])
    if not answered.strip():
        return "empty answer"
    if _LOST in asked + answered:
        return "not text"
    if any(token in answered for token in tokenizer.all_special_tokens if token):
        return "special token in the answer"
    if len(tokenizer(answered, add_special_tokens=False).input_ids) != row["answer_tokens"]:
        return "reads back as other tokens"
    return None


def share(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    tokenizer: Any,
    settings: SynthesisSettings,
    made: SynthesisReport,
    *,
    heldout: float,
    engine: Mapping[str, Any],
) -> ShareReport:
    """Split what :func:`data.synthesize.synthesize` wrote and put it into ``out``.

    Args:
        source: the file ``conversations.jsonl``.
        out: folder; files of the same names are replaced.
        tokenizer: the target's; answers that it reads as other tokens than were written are dropped and counted.
        settings, made: the synthesis, for the provenance.
        heldout: fraction or count to hold out, by the rule of :mod:`data.overlap`.
        engine: what else determines the answers (weights, dtype, batch size), for the provenance.

    Raises:
        ValueError: too few conversations to hold that many out.
    """
    out = Path(out)
    dropped: Counter[str] = Counter()
    rows: list[dict[str, Any]] = []
    for row in sorted((row for _, row in read_rows(source)), key=lambda row: row["id"]):
        reason = _refuse(row, tokenizer)
        if reason:
            dropped[reason] += 1
        else:
            rows.append({"id": f"{row['id']:06d}", "messages": row["messages"], "finished": row["finished"]})
    prompts = [read_conversation(row, row["id"]).prompt for row in rows]
    parts = split(prompts, heldout, settings.seed)
    out.mkdir(parents=True, exist_ok=True)
    sizes = []
    for name, places in (("train", parts.train), ("heldout", parts.heldout)):
        write_rows(out / f"{name}.jsonl.gz", (rows[i] for i in places))
        sizes.append((out / f"{name}.jsonl.gz").stat().st_size)
    report = ShareReport(
        train=len(parts.train),
        heldout=len(parts.heldout),
        unfinished=sum(not row["finished"] for row in rows),
        dropped=dict(sorted(dropped.items())),
        split=parts.describe(prompts),
        bytes=sum(sizes),
    )
    provenance = {
        "settings": settings.key(),
        "engine": dict(engine),
        "command": command(settings, heldout, engine),
        "synthesis": asdict(made),
        "shared": asdict(report),
    }
    write_text(out / "provenance.json", json.dumps(provenance, indent=2, ensure_ascii=False) + "\n")
    write_text(out / "README.md", _readme(provenance))
    return report


def command(settings: SynthesisSettings, heldout: float, engine: Mapping[str, Any]) -> str:
    """The command that makes the same files again."""
    return (
        f"headstart data synthesize --target {settings.target} --out OUT --conversations {settings.conversations} "
        f"--seed {settings.seed} --prompt-temperature {settings.prompt_temperature} "
        f"--max-prompt-tokens {settings.max_prompt_tokens} --max-answer-tokens {settings.max_answer_tokens} "
        f"--chunk {settings.chunk} --dtype {engine['dtype']} --batch-size {engine['batch_size']} --heldout {heldout:g}"
    )


def _readme(provenance: Mapping[str, Any]) -> str:
    settings, made, shared = provenance["settings"], provenance["synthesis"], provenance["shared"]
    pair = shared["split"]["closest_pair"]
    engine = ", ".join(f"{key} {value}" for key, value in provenance["engine"].items())
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(made["prompts_dropped"].items())) or "none"
    lost = ", ".join(f"{count} {reason}" for reason, count in shared["dropped"].items()) or "none"
    return f"""# Conversations of {settings["target"]} with itself

The target wrote the users' prompts (its chat template fed up to the user's turn, then sampled at temperature
{settings["prompt_temperature"]}) and answered them greedily, {settings["max_answer_tokens"]} tokens at most.
Nobody else's text is in here. What it says is often wrong: the files are for training draft heads on how this
target speaks, and for nothing else.

| | |
|---|---|
| `train.jsonl.gz` | {shared["train"]} conversations |
| `heldout.jsonl.gz` | {shared["heldout"]} conversations, for measuring |
| unfinished answers | {shared["unfinished"]}, marked `"finished": false`, to be rendered without an end of turn |
| answer tokens written | {made["answer_tokens"]} |
| prompts sampled | {made["prompts_sampled"]}, of which dropped: {counts} |
| conversations dropped | {lost} |
| made with | {engine} |

No held-out prompt shares a run of 13 words, or a Jaccard index of words of 0.7 or more, with a training prompt. The
closest pair has an index of {pair["similarity"]:.2f} and {pair["common_run_of_words"]} words in a row in common:

- training: {json.dumps(pair["train"], ensure_ascii=False)}
- held out: {json.dumps(pair["heldout"], ensure_ascii=False)}

To make the files again (greedy answers may fall otherwise at near-ties on another processor):

```
{provenance["command"]}
```
"""
