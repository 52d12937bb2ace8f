"""Verbs of this package: ``push``, ``bundle``, ``export``, ``import``, ``merge``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from heads import push_verb

DTYPES = ("float32", "bfloat16", "float16")


def register(add: Callable[..., None]) -> None:
    """Give the command line this package's verbs."""
    add(
        "push",
        help="upload heads, or a bundle, to the Hugging Face Hub, with a card written from what was measured",
        example="headstart push runs/quickstart/heads ORG/NAME --report runs/quickstart/summary.json",
        configure=push_verb.configure_push,
        run=push_verb.run_push,
    )
    add(
        "bundle",
        help="put heads and their target into one folder, so that there are no separate weights to manage",
        example="headstart bundle runs/quickstart/heads --out runs/quickstart/bundle",
        configure=push_verb.configure_bundle,
        run=push_verb.run_bundle,
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
    from heads.formats.anywhere import as_stored
    from heads.formats.folder import check_new
    from heads.hub import locate
    from heads.store import read_config

    check_new(args.out)  # before a target is loaded
    place = locate(args.heads)
    record = read_config(place.folder).target
    heads = as_stored(place, args.target)
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

    parser.add_argument("checkpoint", help="its folder or Hub id, or its weights' file (.pt and .bin only so)")
    parser.add_argument("--revision", metavar="NAME", help="of a Hub id: a branch, tag or commit")
    parser.add_argument("--target", required=True, metavar="NAME", help="the model it was made for: a folder or Hub id")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="a new folder for the heads")
    parser.add_argument("--engine", choices=ENGINES, help="for which it was made, where its config names layers")
    parser.add_argument("--lookahead", type=int, metavar="K", help="how deep to draft (default: as it says, or 5)")


def _import(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from heads.formats import import_heads
    from heads.formats.anywhere import fetch_checkpoint
    from heads.formats.folder import check_new, weights_in
    from heads.hub import Access
    from heads.target import Target

    check_new(args.out)  # as what is no checkpoint, refused before a target is loaded
    path = fetch_checkpoint(args.checkpoint, Access(args.revision))
    if path.is_dir():
        weights_in(path)
    target = Target.load(args.target, dtype="auto")
    done = import_heads(path, target, args.out, engine=args.engine, lookahead=args.lookahead)
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
    parser.add_argument("adapter", help="folder or Hub id of the adapter, or of heads with their factors on them")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="a new folder for the heads")
    parser.add_argument(
        "--heads", metavar="NAME", help="the heads it belongs on, where they are no longer where they were"
    )


def _merge(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from heads.adapter import load_adapter
    from heads.formats.anywhere import as_stored
    from heads.hub import locate
    from heads.layout import ADAPTER
    from heads.tuned import merge

    if args.out.exists():
        raise ValueError(f"{args.out} is there already: name a new folder")
    place = locate(args.adapter)
    alone = (place.folder / ADAPTER).is_file()
    heads = load_adapter(args.adapter, base=args.heads) if alone else as_stored(place)
    if heads.config.lora is None:
        raise ValueError(f"{args.adapter} are ordinary heads already: there is nothing to merge")
    heads = merge(heads)
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
