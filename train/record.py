"""run.json: what a run was made with (versions, settings, data, code, command), and each launch of it."""

from __future__ import annotations

import json
import os
import platform
import secrets
import subprocess
import sys
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml

from train.conversations import Conversations
from train.files import write_whole
from train.loop import Trainer
from train.settings import to_dict
from train.trackers import without_secrets

RECORD, SETTINGS = "run.json", "config.yaml"
PACKAGES = (
    "headstart", "torch", "transformers", "accelerate", "datasets", "safetensors", "tokenizers", "numpy", "deepspeed",
    "peft",
)  # fmt: skip
ROOT = Path(__file__).resolve().parent.parent


def write_record(trainer: Trainer, heldout: Conversations | None, started: datetime) -> dict[str, Any]:
    """Write run.json and config.yaml, without secrets; returns what run.json holds, on every process.

    A run that goes on keeps its id and the list of its launches; all else is of the newest launch. config.yaml are the
    effective settings, which can be given to ``--config`` again.
    """
    config, ranks, folder = trainer.config, trainer.ranks, trainer.folder
    record: dict[str, Any] = {}
    if ranks.main:
        earlier = _earlier(folder / RECORD)
        settings = without_secrets(to_dict(config))
        launch = {
            "started": started.isoformat(timespec="seconds"),
            "from_step": trainer.progress.step,
            "processes": ranks.count,
            "command": without_secrets(sys.argv),
        }
        record = {
            "id": earlier.get("id") or secrets.token_hex(6),
            "versions": {"python": platform.python_version()} | _versions(),
            "git": git_revision(ROOT),
            "config": settings,
            "data": {
                "train": {"sha256": trainer.train.conversations.digest, **_size(trainer.train.conversations)},
                "heldout": {"sha256": heldout.digest, **_size(heldout)} if heldout is not None else None,
            },
            "target": trainer.heads.target.identity().to_dict(),
            "parameters": trainer.engine.trained,
            "steps": trainer.total,
            "world": {
                "processes": ranks.count,
                "engine": trainer.engine.name,
                "device": _device(trainer.accelerator.device),
                "threads": torch.get_num_threads(),
                "platform": platform.platform(),
            },
            "launches": [*earlier.get("launches", []), launch],
        }
        write_whole(folder / RECORD, json.dumps(record, indent=1) + "\n")
        write_whole(folder / SETTINGS, yaml.safe_dump(settings, sort_keys=False))
    return dict(ranks.share(record))


def _earlier(path: Path) -> dict[str, Any]:
    """What an earlier launch left; nothing of a file that is none of ours."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("launches"), list) else {}


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _size(conversations: Conversations) -> dict[str, Any]:
    return {
        "from": conversations.where,
        "conversations": len(conversations),
        "tokens": int(conversations.lengths.sum()),
        "answer_tokens": conversations.answer_tokens,
    }


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({os.cpu_count()} cores)"


def git_revision(root: Path) -> dict[str, Any] | None:
    """Commit of a checkout, and whether tracked files differ from it; None where the code is no checkout."""
    if not (root / ".git").exists():
        return None
    try:
        commit, changed = (
            subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=20, check=True)
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.stdout.strip(), "changed": bool(changed.stdout.strip())}
