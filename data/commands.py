"""The verbs ``data synthesize`` and ``data prepare``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.completer import Completer
from data.share import share
from data.synthesize import ANSWERS, SynthesisSettings, synthesize

TARGET = "headstart/smollm2-135m-q4"
"""The embedded default target's name."""

Report = tuple[dict[str, Any], str]
Engine = Callable[[str, str, int], tuple[Completer, Any]]


class Progress:
    """Progress on stderr with rate and time left: one living line on a terminal, a line now and then in a log."""

    def __init__(self, pause: float = 30.0) -> None:
        self._terminal = sys.stderr.isatty()
        self._pause = 0.2 if self._terminal else pause
        self._stage, self._begun, self._first, self._told = "", 0.0, 0, 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._begun, self._first, self._told = stage, now, done, 0.0
        if now - self._told < self._pause and done != total:
            return
        self._told = now
        rate = (done - self._first) / max(now - self._begun, 1e-9)
        left = f", {(total - done) / rate / 60:.0f} min left" if total and rate > 0 and done < total else ""
        line = f"{stage} {done}{f'/{total}' if total else ''}" + (f", {rate:.1f}/s{left}" if rate > 0 else "")
        ends = "\n" if not self._terminal or done == total else ""
        print(("\r\033[K" if self._terminal else "") + line, end=ends, file=sys.stderr, flush=True)


def _amount(text: str) -> float:
    """A fraction below 1, or a whole count; 0 for none."""
    value = float(text)
    if value < 0 or (value >= 1 and value != int(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a fraction below 1 nor a count")
    return value


def _synthesis_options(parser: argparse.ArgumentParser) -> None:
    defaults = SynthesisSettings(TARGET)
    parser.add_argument("--out", type=Path, required=True, help="folder; a stopped run goes on where it was")
    parser.add_argument("--target", default=TARGET, help="embedded name, folder or Hub id (default: %(default)s)")
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
    parser.add_argument("--batch-size", type=int, default=128, help="rows decoded together (default: %(default)s)")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="of the target (default: %(default)s)",
    )
    parser.add_argument(
        "--heldout",
        type=_amount,
        default=0.0,
        metavar="FRACTION|COUNT",
        help="also write train.jsonl.gz and heldout.jsonl.gz, with no near-double across (default: neither)",
    )


def _synthesize(args: argparse.Namespace, engine: Engine, weights: Callable[[str], str] | None) -> Report:
    for name in ("conversations", "max_prompt_tokens", "max_answer_tokens", "chunk", "batch_size"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}, it must be 1 or more")
    settings = SynthesisSettings(
        target=args.target,
        conversations=args.conversations,
        seed=args.seed,
        prompt_temperature=args.prompt_temperature,
        max_prompt_tokens=args.max_prompt_tokens,
        max_answer_tokens=args.max_answer_tokens,
        chunk=args.chunk,
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


def _preparation_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sources", nargs="+", type=Path, help="JSON or JSON-lines files, gzipped or not")
    parser.add_argument("--out", type=Path, required=True, help="folder for the prepared dataset")
    parser.add_argument("--target", default=TARGET, help="whose tokenizer and chat template (default: %(default)s)")
    parser.add_argument(
        "--max-length", type=int, default=1024, help="most tokens a conversation (default: %(default)s)"
    )
    parser.add_argument(
        "--heldout", type=_amount, default=0.0, metavar="FRACTION|COUNT", help="hold some out (default: none)"
    )
    parser.add_argument("--seed", type=int, default=0, help="which are held out (default: %(default)s)")


def _prepare(args: argparse.Namespace, tokenizer: Callable[[str], Any]) -> Report:
    from data.prepare import prepare  # the datasets library takes seconds to import, other verbs do without

    report = prepare(
        args.sources,
        tokenizer(args.target),
        args.out,
        max_length=args.max_length,
        heldout=args.heldout,
        seed=args.seed,
        progress=Progress(),
    )
    kept = ", ".join(f"{count} {name}" for name, count in report.kept.items())
    text = [
        f"{report.rows} rows → {kept}" + (" (reused: nothing changed)" if report.reused else ""),
        f"{report.tokens} tokens, {report.supervised} supervised; {report.cut} cut, {report.unfinished} unfinished",
    ]
    if report.orphans:
        text.append(f"{report.orphans} answers before any question were left out")
    if report.dropped:
        text.append("dropped: " + ", ".join(f"{count} {reason}" for reason, count in sorted(report.dropped.items())))
        text += [f"  {line}" for line in report.refused]
    if report.split:
        text.append(f"closest pair across the split: similarity {report.split['closest_pair']['similarity']:.2f}")
    return asdict(report) | {"out": str(args.out)}, "\n".join(text)


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
        configure=_synthesis_options,
        run=lambda args: _synthesize(args, completer, weights),
    )
    add(
        "data prepare",
        help="turn conversations into token ids and loss masks",
        example="headstart data prepare runs/conversations/train.jsonl.gz --out runs/prepared",
        configure=_preparation_options,
        run=lambda args: _prepare(args, tokenizer_of),
    )
