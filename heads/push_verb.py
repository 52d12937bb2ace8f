"""The verbs ``push`` and ``bundle``: heads to the Hub, alone or with their target."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

Report = tuple[dict[str, Any], str]
LICENCES = {"license": "these heads", "target_license": "the target", "data_license": "the data"}


def configure_push(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument(
        "folder", type=Path, help="folder of heads, a bundle, or an adapter; only what belongs to it is uploaded"
    )
    parser.add_argument("repo_id", help="ORG/NAME; made when it does not exist")
    parser.add_argument(
        "--report",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="JSON with what the card may say, may be given several times: a run's report.json, what eval and bench "
        "wrote with --json, a quickstart's summary.json (a certificate.json in the folder is taken by itself)",
    )
    parser.add_argument("--private", action="store_true", default=None, help="make the repository private")
    parser.add_argument("--revision", metavar="BRANCH", help="branch to push to (default: the main one)")
    parser.add_argument("--target-name", metavar="ID", help="the target's Hub id, where it was trained from a folder")
    parser.add_argument("--base", metavar="ID", help="of an adapter: the heads it belongs on (default: as trained)")
    parser.add_argument("--base-revision", metavar="REV", help="of those heads (default: their newest commit)")
    parser.add_argument("--with-base", action="store_true", help="of an adapter: those heads go along, in base/")
    for key, whose in LICENCES.items():
        parser.add_argument(f"--{key.replace('_', '-')}", metavar="ID", help=f"licence of {whose}, such as apache-2.0")
    parser.add_argument("--no-plots", action="store_true", help="a card without pictures (matplotlib draws them)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be uploaded, and ask the Hub nothing")


def run_push(args: argparse.Namespace) -> Report:
    """The token is the one that is logged in: on a command line others could read it."""
    from heads.push import push_folder
    from heads.reports import read_reports

    licences = {key: getattr(args, key) for key in LICENCES if getattr(args, key) is not None}
    pushed = push_folder(
        args.folder,
        args.repo_id,
        private=args.private,
        report=[*read_reports(args.report), *([licences] if licences else [])],
        revision=args.revision,
        target_name=args.target_name,
        with_plots=not args.no_plots,
        base=args.base,
        base_revision=args.base_revision,
        with_base=args.with_base,
        dry_run=args.dry_run,
    )
    if args.dry_run:
        lines = [f"would be pushed to {pushed.repo_id}:", *(f"  {name}" for name in pushed.files)]
    else:
        lines = [f"pushed {len(pushed.files)} files to {pushed.url}", f"weights at commit {pushed.weights_commit}"]
    if pushed.left:
        lines.append(f"not uploaded, because it does not belong to heads: {', '.join(pushed.left)}")
    return asdict(pushed), "\n".join(lines)


def configure_bundle(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("heads", help="folder or Hub id of the heads")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="a new folder; none is overwritten")
    parser.add_argument("--target", metavar="NAME", help="the heads' target, where it is no longer under its name")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the target's weights (default: as they are stored)",
    )


def run_bundle(args: argparse.Namespace) -> Report:
    """Load both as they are stored, and save them as one; a certificate of the heads goes along."""
    import shutil

    import torch

    from heads.formats.anywhere import as_stored
    from heads.formats.folder import check_new
    from heads.hub import locate
    from heads.layout import CERTIFICATE

    check_new(args.out)
    place = locate(args.heads)
    heads = as_stored(place, args.target, dtype="auto" if args.dtype is None else getattr(torch, args.dtype))
    heads.save_pretrained(args.out, bundle=True)
    if (place.folder / CERTIFICATE).is_file():
        shutil.copyfile(place.folder / CERTIFICATE, args.out / CERTIFICATE)
    size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file())
    report = {
        "folder": str(args.out),
        "target": heads.target.name,
        "dtype": str(heads.target.dtype).removeprefix("torch."),
        "bytes": size,
    }
    return report, (
        f"{heads.target.name} in {report['dtype']} and its heads, {size / 1e6:,.0f} MB, written to {args.out}: "
        f"`headstart generate {args.out} …`, `headstart push {args.out} ORG/NAME`"
    )
