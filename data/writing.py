"""The verbs in which the target writes: ``data synthesize`` and ``data regenerate``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.conversation import read_conversation
from data.files import read_rows
from data.local import LocalAnswerer
from data.options import TARGET, Engine, Report, amount, at_least_one, engine_options, source_options, switch, within
from data.progress import Progress
from data.regenerate import CONVERSATIONS, regenerate
from data.rewrite import Answerer
from data.server import ServerAnswerer
from data.share import share
from data.sources import open_sources
from data.split import wanted
from data.synthesize import ANSWERS, SynthesisSettings, synthesize

HELDOUT = Path(__file__).parent / "sample" / "heldout.jsonl.gz"


def synthesis_options(parser: argparse.ArgumentParser) -> None:
    defaults = SynthesisSettings(TARGET)
    parser.add_argument("--out", type=Path, required=True, help="folder; a stopped run goes on where it was")
    engine_options(parser)
    parser.add_argument(
        "--conversations", type=int, default=defaults.conversations, help="how many (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of the prompts (default: %(default)s)")
    parser.add_argument(
        "--prompt-temperature", type=float, default=defaults.prompt_temperature, help="(default: %(default)s)"
    )
    parser.add_argument(
        "--max-prompt-tokens", type=int, default=defaults.max_prompt_tokens, help="(default: %(default)s)"
    )
    parser.add_argument(
        "--max-answer-tokens", type=int, default=defaults.max_answer_tokens, help="(default: %(default)s)"
    )
    parser.add_argument(
        "--chunk", type=int, default=defaults.chunk, help="rows written at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--apart-from",
        action="append",
        default=[],
        metavar="FILE",
        help="write no prompt alike to one of this file, a held-out set say; builtin:heldout is the sample's",
    )
    parser.add_argument(
        "--heldout",
        type=amount,
        default=0.0,
        metavar="FRACTION|COUNT",
        help="also write train.jsonl.gz and heldout.jsonl.gz, with no near-double across (default: neither)",
    )


def run_synthesis(args: argparse.Namespace, engine: Engine, weights: Callable[[str], str] | None) -> Report:
    at_least_one(args, "conversations", "max_prompt_tokens", "max_answer_tokens", "chunk", "batch_size")
    within(args, least=("prompt_temperature",))
    if args.heldout:
        wanted(args.heldout, args.conversations)  # before hours of work, not after
    settings = SynthesisSettings(
        target=args.target,
        conversations=args.conversations,
        seed=args.seed,
        prompt_temperature=args.prompt_temperature,
        max_prompt_tokens=args.max_prompt_tokens,
        max_answer_tokens=args.max_answer_tokens,
        chunk=args.chunk,
        apart_from=tuple(prompt for name in args.apart_from for prompt in _prompts_of(name)),
    )
    completer, tokenizer = engine(args.target, args.dtype, args.batch_size)
    made = synthesize(completer, tokenizer, args.out, settings, Progress())
    report: dict[str, Any] = {
        "file": str(args.out / ANSWERS),
        "unfinished": made.conversations - made.finished,
    } | asdict(made)
    drops = ", ".join(f"{count} {reason}" for reason, count in sorted(made.prompts_dropped.items())) or "none"
    text = [
        f"{made.conversations} conversations, {made.answer_tokens} answer tokens, {report['unfinished']} unfinished",
        f"prompts sampled {made.prompts_sampled}, dropped: {drops}",
        f"written to {args.out / ANSWERS}",
    ]
    if args.heldout:
        described = {"dtype": args.dtype, "batch_size": args.batch_size}
        if weights is not None:
            described["weights"] = weights(args.target)
        shared = share(args.out / ANSWERS, args.out, tokenizer, settings, made, heldout=args.heldout, engine=described)
        report["shared"] = asdict(shared)
        text += [
            f"split: {shared.train} train, {shared.heldout} held out ({shared.bytes / 1e6:.2f} MB in {args.out})",
            f"closest pair across the split: similarity {shared.split['closest_pair']['similarity']:.2f}",
        ]
    return report, "\n".join(text)


def _prompts_of(name: str) -> list[str]:
    """The prompts of a file of conversations."""
    path = HELDOUT if name == "builtin:heldout" else Path(name)
    return [read_conversation(row, f"{path}:{number}").prompt for number, row in read_rows(path)]


def regeneration_options(parser: argparse.ArgumentParser) -> None:
    """Of ``data regenerate``."""
    source_options(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder; a stopped run goes on where it was")
    engine_options(parser)
    parser.add_argument(
        "--heads",
        metavar="NAME",
        help="draft heads of the target, folder or Hub id: fewer passes, the same greedy text",
    )
    parser.add_argument("--max-answer-tokens", type=int, default=512, help="most tokens an answer (default: 512)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: %(default)s)")
    parser.add_argument(
        "--server", metavar="URL", help="an OpenAI-compatible server that has the target, e.g. http://localhost:8000/v1"
    )
    parser.add_argument("--model", help="the target's name there (default: the one it has)")
    parser.add_argument("--concurrency", type=int, default=16, help="requests under way (default: %(default)s)")
    parser.add_argument("--retries", type=int, default=5, help="of a request to a busy server (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=600.0, help="of a request, in seconds (default: 600)")
    parser.add_argument(
        "--api-key-env",
        default="OPENAI_API_KEY",
        metavar="NAME",
        help="environment variable with the server's key, if it needs one (default: %(default)s)",
    )
    switch(parser, "--retry-failed", "ask again what failed in an earlier run")
    switch(parser, "--strict", "exit with 1 unless every row was answered to its end")


def run_regeneration(args: argparse.Namespace, engine: Engine) -> Report:
    """``data regenerate``.

    Raises:
        ValueError: heads for a server, which has its own; and see :func:`data.regenerate.regenerate`.
    """
    at_least_one(args, "max_answer_tokens", "batch_size", "concurrency")
    within(args, above=("timeout",), least=("temperature", "retries"))
    if args.server and args.heads:
        raise ValueError("--heads are for the local engine: a server drafts with what it was started with")
    open_sources(args.sources)  # a file that is missing is said before a target is loaded
    answerer, model = _server(args) if args.server else _local(args, engine)
    settings = {
        "model": model,
        "max_answer_tokens": args.max_answer_tokens,
        "temperature": args.temperature,
        "seed": args.seed,
    }
    if args.heads and args.temperature:  # greedy text is the same with any heads, draws are not
        settings["heads"] = args.heads
    report = regenerate(
        args.sources,
        answerer,
        args.out,
        settings,
        roles=dict(args.role),
        retry_failed=args.retry_failed,
        progress=Progress(),
    )
    told = asdict(report) | {"file": str(args.out / CONVERSATIONS), "ok": report.clean or not args.strict}
    return told, f"{report.table()}\nwritten to {args.out / CONVERSATIONS}"


def _server(args: argparse.Namespace) -> tuple[Answerer, str]:
    server = ServerAnswerer(
        args.server,
        args.model or "",
        args.max_answer_tokens,
        temperature=args.temperature,
        seed=args.seed,
        concurrency=args.concurrency,
        retries=args.retries,
        timeout=args.timeout,
        key=os.environ.get(args.api_key_env) or None,
    )
    server.model = server.model or server.only_model()
    return server, server.model


def _local(args: argparse.Namespace, engine: Engine) -> tuple[Answerer, str]:
    completer, tokenizer = engine(args.target, args.dtype, args.batch_size, args.heads)
    local = LocalAnswerer(
        completer, tokenizer, args.max_answer_tokens, args.temperature, args.seed, chunk=args.batch_size
    )
    return local, args.target
