"""What a run leaves behind at its end: heads/, adapter/ where factors were trained alone, and report.json."""

from __future__ import annotations

import json
import os
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from heads.adapter import save_adapter
from heads.base import DraftHeads
from heads.store import load
from heads.tuned import merge
from heads.vocabulary import coverage
from train.config import RunConfig
from train.conversations import Conversations
from train.engine_state import HEADS
from train.files import write_whole
from train.loop import Trainer, continued_settings
from train.manifest import fault
from train.ranks import Ranks
from train.settings import to_dict
from train.spread import weights_hash
from train.trackers import without_secrets

REPORT, ADAPTER = "report.json", "adapter"


def already_done(config: RunConfig, conversations: Conversations, ranks: Ranks) -> dict[str, Any] | None:
    """The report of a run that ended here with these settings and data, so that a finished run costs nothing again."""
    path = Path(config.output.folder) / REPORT
    found = None
    if ranks.main and config.output.resume and path.is_file() and (path.parent / HEADS / "config.json").is_file():
        report = _read(path)
        same = report.get("settings") == json.loads(json.dumps(_finished_settings(config)))
        if same and report["data"]["digest"] == conversations.digest:
            found = report
    return ranks.share(found)


def _read(path: Path) -> dict[str, Any]:
    """A report; nothing of a file that is damaged, which the run writes again."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _finished_settings(config: RunConfig) -> dict[str, Any]:
    sections = to_dict(config)
    length = {name: sections["train"][name] for name in ("epochs", "max_steps")}
    return without_secrets({**continued_settings(config), **length, "export": config.output.export})


def finish(trainer: Trainer, target_before: str, seconds: float) -> dict[str, Any]:
    """Write heads/ and report.json; returns the report, on every process.

    Raises:
        ValueError: the target's weights are not what they were (a fault of the program).
        OSError: the disk refused.
    """
    config, ranks = trainer.config, trainer.ranks
    folder = trainer.folder
    report: dict[str, Any] = {}
    error: Exception | None = None
    weights, target_after = trainer.engine.whole_heads(), weights_hash(trainer.heads.target, ranks.main)
    if ranks.main:
        try:
            if target_after != target_before:
                raise ValueError("the target's weights changed during training: these heads belong to no target")
            best = config.output.export == "best" and trainer.progress.best_step >= 0
            if weights.config.lora is not None and config.heads.init is not None:
                dtype = next(weights.parameters()).dtype
                _separate(
                    folder,
                    load(_best(trainer), trainer.heads.target, dtype=dtype) if best else weights,
                    config.heads.init,
                )
            elif best:
                _copy_heads(_best(trainer), folder / HEADS)
            else:
                weights.save_pretrained(folder / HEADS)
            report = _report(trainer, target_after, seconds)
            write_whole(folder / REPORT, json.dumps(report, indent=1) + "\n")
        except (ValueError, OSError) as caught:
            error = caught
    ranks.all_succeed(error, f"writing {folder / HEADS}")
    trainer.reporter.say(f"heads written to {folder / HEADS}")
    report = ranks.share(report)
    trainer.accelerator.end_training()  # writes out the curves and takes the process group down
    return report


def _best(trainer: Trainer) -> Path:
    """The heads of the best checkpoint, if it is what was written.

    Raises:
        ValueError: it is gone or damaged.
    """
    place = trainer.checkpoints.at(trainer.progress.best_step)
    wrong = fault(place, Ranks())
    if wrong:
        raise ValueError(
            f"the best checkpoint {place} is damaged ({wrong}): run again with output.export last, which takes the "
            "heads as they are now"
        )
    return place / HEADS


def _separate(folder: Path, heads: DraftHeads, base: str) -> None:
    """What was trained, apart, as adapter/; and merged with the heads it was trained on, as heads/."""
    save_adapter(heads, folder / ADAPTER, base)
    merge(heads).save_pretrained(folder / HEADS)


def _copy_heads(source: Path, folder: Path) -> None:
    """Copy a checkpoint's heads, weights before config, each beside its place first."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("heads.safetensors", "config.json"):
        partial = folder / f".{name}.partial"
        try:
            shutil.copyfile(source / name, partial)
            os.replace(partial, folder / name)
        finally:
            partial.unlink(missing_ok=True)


def draft_vocabulary(trainer: Trainer) -> dict[str, Any] | None:
    """What the heads can draft: ``tokens`` of ``of``, and the share of the target's answers that they never can,
    in training and held out (None without held-out conversations); None for the whole vocabulary."""
    heads = trainer.heads
    if heads.draft_ids is None:
        return None
    missing = {
        part: None
        if source is None
        else 1 - coverage(source.conversations.answer_counts(heads.config.vocab_size), heads.draft_ids.cpu())
        for part, source in (("train", trainer.train), ("heldout", trainer.heldout))
    }
    return {"tokens": len(heads.draft_ids), "of": heads.config.vocab_size, "never_drafted": missing}


def _report(trainer: Trainer, target_hash: str, seconds: float) -> dict[str, Any]:
    conversations = trainer.train.conversations
    evaluation = trainer.progress.evaluation or {}
    return {
        "steps": trainer.progress.step,
        "seconds": round(seconds, 1),
        "processes": trainer.ranks.count,
        "engine": trainer.engine.name,
        "best": {"step": trainer.progress.best_step, "tokens_per_round": trainer.progress.best},
        "train": trainer.progress.figures,
        **{name: value for name, value in evaluation.items() if name != "step"},
        "data": {
            "conversations": len(conversations),
            "tokens": int(conversations.lengths.sum()),
            "answer_tokens": conversations.answer_tokens,
            "longest_tokens": int(conversations.lengths.max()),
            "digest": conversations.digest,
        },
        "draft_vocabulary": draft_vocabulary(trainer),
        "target_sha256": target_hash,
        "heads": trainer.heads.config.to_dict(),
        "settings": _finished_settings(trainer.config),
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")},
    }
