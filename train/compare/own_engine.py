"""A peer's heads decoded by the peer's own engine, so that its figures do not hang on how we decode them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heads.embedded import resolve
from heads.target import Target
from infer.evaluate import Question, summary
from infer.metrics import Round, Stats, mark_loops
from train.peers import meter
from train.peers.contest import HERE, environment
from train.peers.inside.job import write_json

MODULES = {"economize": "inside.economize_decode"}  # peers that decode by themselves here
DRAFTS = 7


def decode(
    package: str,
    python: Path,
    checkpoint: Path,
    target: Target,
    questions: Sequence[Question],
    max_new_tokens: int,
    threads: int,
    work: Path,
) -> dict[str, Any]:
    """Figures of greedy chains of ``DRAFTS`` by the peer's own loop.

    Args:
        checkpoint: as the peer saved it.
        work: a folder for the job, its result and its log; the result is found again for the same job.

    Raises:
        OSError: it failed.
    """
    ends, place = target.model.generation_config.eos_token_id, Path(resolve(target.name))
    job = {
        "target": str(place.resolve()) if place.is_dir() else target.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "checkpoint": str(checkpoint.resolve()),
        "prompts": [question.ids[0].tolist() for question in questions],
        "drafts": DRAFTS,
        "max_new_tokens": max_new_tokens,
        "stop": ends if isinstance(ends, list) else [] if ends is None else [ends],
        "threads": threads,
        "out": str((work / "decoded.json").resolve()),
    }
    work.mkdir(parents=True, exist_ok=True)
    asked, done = work / "job.json", work / "decoded.json"
    if not (done.is_file() and asked.is_file() and json.loads(asked.read_text(encoding="utf-8")) == job):
        done.unlink(missing_ok=True)
        write_json(asked, job)
        meter.run(
            [str(python), "-m", MODULES[package], str(asked.resolve())], environment(HERE, threads), work / "log.txt"
        )
    found = json.loads(done.read_text(encoding="utf-8"))
    stats = [stats_of(row["tokens"], row["rounds"]) for row in found["prompts"]]
    return {"version": found["version"], f"chain {DRAFTS}": summary(stats)}


def stats_of(tokens: list[int], rounds: list[list[int]]) -> Stats:
    """As we count: the prefill's token is no round's, and the last round ends where the text does.

    Raises:
        ValueError: the rounds do not make up the text.
    """
    stats, left = Stats(tokens=len(tokens)), len(tokens) - 1
    for drafted, accepted in rounds:
        if left <= 0:  # drafted for a text that had ended
            break
        emitted = min(accepted + 1, left)
        stats.log.append(Round(drafted, drafted, min(accepted, left), emitted))
        left -= emitted
    if left > 0:
        raise ValueError(
            f"{len(rounds)} rounds make {len(tokens) - left} of {len(tokens)} tokens: not as we count them"
        )
    mark_loops(stats.log, tokens)
    return stats
