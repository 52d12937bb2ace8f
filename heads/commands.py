"""Verbs of this package: ``push``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any


def register(add: Callable[..., None]) -> None:
    """Give the command line this package's verbs."""
    add(
        "push",
        help="upload heads to the Hugging Face Hub, with a card written from what was measured",
        example="headstart push runs/quickstart/heads ORG/NAME --report runs/quickstart/summary.json",
        configure=_configure,
        run=_push,
    )


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="folder of heads; only its config and weights are uploaded")
    parser.add_argument("repo_id", help="ORG/NAME; made when it does not exist")
    parser.add_argument("--report", type=Path, metavar="FILE", help="JSON with what the card may say (summary.json, …)")
    parser.add_argument("--private", action="store_true", default=None, help="make the repository private")
    parser.add_argument("--revision", metavar="BRANCH", help="branch to push to (default: the main one)")
    parser.add_argument("--target-name", metavar="ID", help="the target's Hub id, where it was trained from a folder")


def _push(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The token is the one that is logged in: on a command line others could read it."""
    from heads.hub import push_folder

    pushed = push_folder(
        args.folder,
        args.repo_id,
        private=args.private,
        report=None if args.report is None else _read(args.report),
        revision=args.revision,
        target_name=args.target_name,
    )
    lines = [f"pushed {len(pushed.files)} files to {pushed.url}", f"weights at commit {pushed.weights_commit}"]
    return asdict(pushed), "\n".join(lines)


def _read(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ValueError(f"--report {path} is not JSON: {problem}") from None
    if not isinstance(report, dict):
        raise ValueError(f"--report {path} must hold a JSON object, not a {type(report).__name__}")
    return report
