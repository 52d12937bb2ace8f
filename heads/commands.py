"""Verbs of this package: ``push``, ``export``, ``import``, ``merge``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")


def register(add: Callable[..., None]) -> None:
    """Give the command line this package's verbs."""
    add(
        "push",
        help="upload heads to the Hugging Face Hub, with a card written from what was measured",
        example="headstart push runs/quickstart/heads ORG/NAME --report runs/quickstart/summary.json",
        configure=_configure,
        run=_push,
    )
    add(
        "export",
        help="write heads as another project stores them, to be served by vLLM or SGLang",
        example="headstart export runs/quickstart/heads --to eagle3 --out runs/quickstart/eagle3",
        configure=_configure_export,
        run=_export,
    )
    add(
        "import",
        help="make heads of another project's checkpoint, to decode with and to train further",
        example="headstart import downloads/EAGLE3 --target ORG/TARGET --out runs/eagle3",
        configure=_configure_import,
        run=_import,
    )
    add(
        "merge",
        help="make ordinary heads of an adapter and the heads it was trained on",
        example="headstart merge runs/domain/adapter --out runs/domain/merged",
        configure=_configure_merge,
        run=_merge,
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


def _configure_export(parser: argparse.ArgumentParser) -> None:
    from heads.formats import ENGINES, FORMATS

    parser.add_argument("heads", help="folder or Hub id of the heads")
    parser.add_argument("--to", required=True, choices=FORMATS, help=_formats())
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="a new folder; none is overwritten")
    parser.add_argument("--engine", choices=ENGINES, help="where one folder cannot be right in both engines")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as they are stored)")
    parser.add_argument("--target", metavar="NAME", help="the heads' target, where it is no longer under its name")
    parser.add_argument("--target-name", metavar="ID", help="name to record for the target (default: the heads' own)")


def _export(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The target is loaded as it is stored: a form may need its embedding or its output matrix."""
    import torch

    from heads.formats import export_heads
    from heads.formats.checkpoint import read_header
    from heads.hub import fetch
    from heads.store import WEIGHTS, load, read_config
    from heads.target import Target

    folder = fetch(args.heads)
    record = read_config(folder).target
    name, revision = (args.target, None) if args.target else (record.name, record.revision)
    target = Target.load(name, revision=revision, dtype="auto")
    kept = [entry.dtype for entry in read_header(folder / WEIGHTS).values() if entry.dtype.is_floating_point]
    heads = load(folder, target, dtype=max(kept, key=lambda dtype: dtype.itemsize, default=None))
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    done = export_heads(
        heads, args.to, args.out, engine=args.engine, dtype=dtype, target_name=args.target_name or args.target
    )
    where = f", right in {' and '.join(done.engines)}" if done.engines else ""
    lines = [f"{done.format}: {done.tensors} tensors in {done.dtype} written to {done.folder}{where}"]
    if done.target != record.name or Path(done.target).exists():
        lines.append(f"target recorded as {done.target} (another name: --target-name)")
    return asdict(done), "\n".join([*lines, *done.notes])


def _configure_import(parser: argparse.ArgumentParser) -> None:
    from heads.formats import ENGINES

    parser.add_argument("checkpoint", type=Path, help="its folder, or its weights' file (.pt and .bin only so)")
    parser.add_argument("--target", required=True, metavar="NAME", help="the model it was made for: a folder or Hub id")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="a new folder for the heads")
    parser.add_argument("--engine", choices=ENGINES, help="for which it was made, where its config names layers")
    parser.add_argument("--lookahead", type=int, metavar="K", help="how deep to draft (default: as it says, or 5)")


def _import(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from heads.formats import import_heads
    from heads.target import Target

    target = Target.load(args.target, dtype="auto")
    done = import_heads(args.checkpoint, target, args.out, engine=args.engine, lookahead=args.lookahead)
    heads = done.heads
    report = {
        "format": done.format,
        "folder": str(args.out),
        "kind": heads.config.kind,
        "lookahead": heads.config.lookahead,
        "taps": list(heads.config.taps),
        "draft_vocab_size": heads.config.draft_vocab_size,
        "dtype": str(next(heads.parameters()).dtype).removeprefix("torch."),
        "parameters": sum(parameter.numel() for parameter in heads.parameters()),
        "target": target.name,
        "recorded_target": done.recorded_target,
    }
    lines = [
        f"{done.format}: {report['kind']} heads, look-ahead {report['lookahead']}, taps {report['taps']}, "
        f"{report['parameters']:,} parameters in {report['dtype']}, written to {args.out}"
    ]
    if done.recorded_target not in (None, target.name):
        lines.append(f"the checkpoint names its target {done.recorded_target}; these heads were put on {target.name}")
    return report, "\n".join(lines)


def _configure_merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapter", type=Path, help="folder of the adapter")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="a new folder for the heads")
    parser.add_argument(
        "--heads", metavar="NAME", help="the heads it belongs on, where they are no longer where they were"
    )


def _merge(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from heads.tuned import load_adapter, merge

    if args.out.exists():
        raise ValueError(f"{args.out} is there already: name a new folder")
    heads = merge(load_adapter(args.adapter, base=args.heads))
    heads.save_pretrained(args.out)
    report = {
        "folder": str(args.out),
        "kind": heads.config.kind,
        "target": heads.target.name,
        "parameters": sum(parameter.numel() for parameter in heads.parameters()),
    }
    return report, f"{report['kind']} heads for {report['target']} written to {args.out}"


def _formats() -> str:
    from heads.formats import FORMATS

    return "; ".join(f"{name}: {format.what}" for name, format in FORMATS.items())


def _read(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ValueError(f"--report {path} is not JSON: {problem}") from None
    if not isinstance(report, dict):
        raise ValueError(f"--report {path} must hold a JSON object, not a {type(report).__name__}")
    return report
