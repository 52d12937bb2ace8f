"""The verbs of this package: ``data synthesize``, ``data prepare``, ``data regenerate`` and ``data inspect``."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.options import TARGET, Engine, Report, amount, at_least_one, source_options, switch, within
from data.progress import Progress
from data.writing import regeneration_options, run_regeneration, run_synthesis, synthesis_options

__all__ = ["TARGET", "register"]


def _preparation_options(parser: argparse.ArgumentParser) -> None:
    source_options(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder for the prepared dataset")
    parser.add_argument("--target", default=TARGET, help="whose tokenizer and chat template (default: %(default)s)")
    parser.add_argument(
        "--max-length", type=int, default=1024, help="most tokens a conversation (default: %(default)s)"
    )
    parser.add_argument(
        "--heldout", type=amount, default=0.0, metavar="FRACTION|COUNT", help="hold some out (default: none)"
    )
    parser.add_argument("--seed", type=int, default=0, help="which are held out (default: %(default)s)")
    parser.add_argument("--processes", type=int, help="that prepare at once (default: by the size of the data)")
    switch(parser, "--strict", "exit with 1 if any row was refused or lost a turn")


def _prepare(args: argparse.Namespace, tokenizer: Callable[[str], Any]) -> Report:
    from data.prepare import prepare  # the datasets library takes seconds to import, other verbs do without

    at_least_one(args, "max_length", "processes")
    report = prepare(
        args.sources,
        tokenizer(args.target),
        args.out,
        args.max_length,
        args.heldout,
        args.seed,
        roles=dict(args.role),
        processes=args.processes,
        progress=Progress(),
    )
    kept = ", ".join(f"{count} {name}" for name, count in report.kept.items())
    text = [
        report.table(),
        f"{report.rows} rows → {kept}" + (" (reused: nothing changed)" if report.reused else ""),
        f"{report.sequences} sequences, {report.tokens} tokens, {report.supervised} of them learned, in {args.out}",
    ]
    if report.resumed:
        text.append(f"{report.resumed} rows had been prepared by a run that was stopped")
    if report.split:
        text.append(f"closest pair across the split: similarity {report.split['closest_pair']['similarity']:.2f}")
    return asdict(report) | {"out": str(args.out), "ok": report.clean or not args.strict}, "\n".join(text)


def _inspection_options(parser: argparse.ArgumentParser) -> None:
    source_options(parser)
    parser.add_argument("--target", default=TARGET, help="whose tokenizer and chat template (default: %(default)s)")
    parser.add_argument("--max-length", type=int, help="cut as preparing would (default: not at all)")
    parser.add_argument("--split", default="train", help="of a prepared folder (default: %(default)s)")
    parser.add_argument("--skip", type=int, default=0, help="sequences to pass over (default: %(default)s)")
    parser.add_argument("--count", type=int, default=1, help="sequences to show (default: %(default)s)")


def _inspect(args: argparse.Namespace, tokenizer: Callable[[str], Any]) -> Report:
    from data.show import COLOURED, MARKED, show

    at_least_one(args, "max_length", "count")
    within(args, least=("skip",))
    marks = COLOURED if sys.stdout.isatty() else MARKED
    every = show(
        args.sources, tokenizer(args.target), max_length=args.max_length, roles=dict(args.role), split=args.split
    )
    shown = list(itertools.islice(every, args.skip, args.skip + args.count))
    if not shown:
        raise ValueError(f"there are no more than {args.skip} sequences: lower --skip")
    legend = f"learned tokens stand between {marks[0]} and {marks[1]}" if marks is MARKED else ""
    text = "\n\n".join([*([legend] if legend else []), *(one.text(marks) for one in shown)])
    read = any(one.refused is None for one in shown)  # a file of which nothing can be read is no success
    return {"sequences": [asdict(one) for one in shown], "ok": read}, text


def register(
    add: Callable[..., None],
    completer: Engine,
    tokenizer: Callable[[str], Any] | None = None,
    weights: Callable[[str], str] | None = None,
) -> None:
    """Register the verbs of this package.

    Args:
        add: registers one verb.
        completer: ``(target, dtype, batch size) → (engine, tokenizer)``.
        tokenizer: ``target → tokenizer``; by default the whole engine is loaded for it.
        weights: ``target → hash`` of its weights, put into the provenance of what is synthesized.
    """
    tokenizer_of = tokenizer or (lambda target: completer(target, "bfloat16", 1)[1])
    add(
        "data synthesize",
        help="let the target write conversations: prompts, then greedy answers",
        example="headstart data synthesize --out runs/conversations --conversations 1500 --heldout 100",
        configure=synthesis_options,
        run=lambda args: run_synthesis(args, completer, weights),
    )
    add(
        "data prepare",
        help="turn conversations into token ids and loss masks",
        example="headstart data prepare runs/conversations/train.jsonl.gz --out runs/prepared",
        configure=_preparation_options,
        run=lambda args: _prepare(args, tokenizer_of),
    )
    add(
        "data regenerate",
        help="let the target write the answers of conversations anew",
        example="headstart data regenerate chats.jsonl --out runs/own --server http://localhost:8000/v1",
        configure=regeneration_options,
        run=lambda args: run_regeneration(args, completer),
    )
    add(
        "data inspect",
        help="show conversations as the target reads them, with the tokens that are learned marked",
        example="headstart data inspect chats.jsonl --count 3",
        configure=_inspection_options,
        run=lambda args: _inspect(args, tokenizer_of),
    )
