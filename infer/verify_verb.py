"""The verb ``verify``: a certificate for heads of any form: folder, Hub repository, another project's checkpoint."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch

from heads.formats import ENGINES
from heads.formats.anywhere import Source, find
from heads.layout import CERTIFICATE
from heads.target import Target
from infer import certify, evaluate
from infer.drafters import Drafter, HeadsDrafter
from infer.law import Sampling
from infer.options import above_zero, part, positive, sample
from infer.prompts import read_prompts

Report = tuple[dict[str, Any], str]

# open beginnings, where much may follow; the certificate takes those at which a wrong rule would show most
LAW_TEXTS = (
    "Once upon a time there was a",
    "My favourite food is",
    "The best way to",
    "In the morning she",
    "Yesterday I met a man who",
    "We should all",
    "The city of",
    "When it rains",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    parser.add_argument("heads", help="folder or Hub id of heads, of a bundle, or of an exported checkpoint")
    parser.add_argument(
        "--target", metavar="NAME", help="their target, where it is not under its name, or a checkpoint names none"
    )
    parser.add_argument("--engine", choices=ENGINES, help="for which a checkpoint was made, where it names layers")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="jsonl (default: the held-out part of the sample)")
    parser.add_argument("--prompts-count", type=positive, default=6, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=positive, default=48, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--draws",
        type=positive,
        default=1000,
        metavar="N",
        help="sampled rounds behind each of two prompts (default: %(default)s)",
    )
    parser.add_argument("--temperature", type=above_zero, default=0.7, help="of sampling (default: %(default)s)")
    parser.add_argument("--top-p", type=part, default=0.9, metavar="P", help="of sampling (default: %(default)s)")
    parser.add_argument("--top-k", type=positive, metavar="K", help="of sampling (default: no such filter)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling (default: %(default)s)")
    parser.add_argument(
        "--certificate", type=Path, metavar="FILE", help=f"where it goes (default: HEADS/{CERTIFICATE}, or here)"
    )


def run(args: argparse.Namespace) -> Report:
    """Certify, and write certificate.json."""
    source = find(args.heads, engine=args.engine)
    path = args.certificate or (source.folder or Path()) / CERTIFICATE
    _check_place(path)  # before the work, not after
    drafter = _pair(source, args.target, torch.float32)[1]
    tokenizer = drafter.heads.target.tokenizer()
    prompts = read_prompts(args.prompts or sample(), limit=args.prompts_count)
    plan = certify.Plan.usual(
        drafter.lookahead,
        max_new_tokens=args.max_new_tokens,
        sampling=Sampling(args.draws, args.temperature, args.top_k, args.top_p, seed=args.seed),
    )
    about = {
        "name": args.heads,
        "sha256": source.sha256(),
        "form": source.form,
        "kind": drafter.heads.config.kind,
        "commit": source.commit,
    }
    del drafter

    def load(dtype: torch.dtype) -> tuple[Target, Drafter]:
        return _pair(source, args.target, dtype)

    certificate = certify.certify(
        load,
        evaluate.ask(prompts, tokenizer),
        [torch.tensor([tokenizer(text)["input_ids"]]) for text in LAW_TEXTS],
        plan,
    )
    certificate = {"ok": certificate["passed"], "heads": about} | certificate
    _write(certificate, path)
    return certificate, f"{certify.table(certificate)}\nwritten to {path}"


def _check_place(path: Path) -> None:
    """Refuse a place that no certificate can be written to."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--certificate {path}: the folder {path.parent} does not exist, make it first")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise PermissionError(f"the certificate cannot be written to {path}: name another file with --certificate")


def _pair(source: Source, target_name: str | None, dtype: torch.dtype) -> tuple[Target, HeadsDrafter]:
    target = None if target_name is None else Target.load(target_name, dtype=dtype)
    heads = source.load(target, dtype)
    return heads.target, HeadsDrafter(heads)


def _write(report: dict[str, Any], path: Path) -> None:
    """Whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
