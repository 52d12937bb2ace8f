"""The command line: registers the verbs of each package, prints their report, writes it as JSON when asked.

Each package's ``commands.py`` defines its verbs; here they only get a place, ``--json`` and one way to fail.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

__version__ = "0.1.0"

HERE = Path(__file__).resolve().parent
PACKAGES = ("data", "train", "infer", "heads")

Report = tuple[dict[str, Any], str]


class Parser(argparse.ArgumentParser):
    """argparse that says what was wrong in one line and where to read on, instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see `{self.prog} --help`)\n")


class Verbs:
    """The tree of verbs; ``add`` is what a package's ``register`` is given."""

    def __init__(self) -> None:
        self.parser = Parser(
            prog="headstart",
            description="Train draft heads on a frozen target and decode with them: faster, in its own exact words.",
            epilog="example: headstart quickstart\n\n`headstart VERB --help` shows each verb's options and an example.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.parser.add_argument("--version", action="version", version=f"headstart {__version__}")
        self._groups = {"": self.parser.add_subparsers(title="verbs", metavar="VERB", required=True)}

    def add(
        self,
        name: str,
        *,
        help: str,
        example: str,
        configure: Callable[[argparse.ArgumentParser], None],
        run: Callable[[argparse.Namespace], Report],
    ) -> None:
        """Register the verb ``name`` (``"eval"``, or ``"data prepare"`` for one of a group).

        ``run`` returns the report as a dict and as text for people. A report with ``"ok": False`` says that what was
        asked for did not hold (a certificate that failed): it is shown and written, and the exit status is 1.
        """
        group, _, verb = name.rpartition(" ")
        parser = self._group(group).add_parser(
            verb,
            help=help,
            description=help[0].upper() + help[1:] + ".",
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        configure(parser)
        parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report to FILE as JSON")
        parser.set_defaults(run=run, verb=parser)

    def _group(self, name: str) -> Any:
        if name not in self._groups:
            parser = self._groups[""].add_parser(name, help=f"{name} verbs: see `headstart {name} --help`")
            self._groups[name] = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
        return self._groups[name]


class LocalEngine:
    """What data/ needs of a target and may not load itself: infer's engine, a tokenizer, a hash of the weights."""

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}

    def completer(self, target_name: str, dtype: str, batch_size: int, heads: str | None = None, /) -> tuple[Any, Any]:
        """The engine behind data's protocol, with ``heads`` that draft in it or none, and the tokenizer.

        Raises:
            ValueError: nothing says which token ends a turn, or the heads are another target's.
        """
        import torch

        from heads.base import DraftHeads
        from heads.target import Target
        from infer.completer import LocalCompleter

        target = self.loaded[target_name] = Target.load(target_name, dtype=getattr(torch, dtype))
        tokenizer = target.tokenizer()
        ends = target.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        known = tuple(dict.fromkeys(end for end in [tokenizer.eos_token_id, *ends] if end is not None))
        if not known:
            raise ValueError(f"{target_name}: neither its tokenizer nor its generation config names an end token")
        draft = None if heads is None else DraftHeads.from_pretrained(heads, target)
        return LocalCompleter(target.model, known, batch_size, draft), tokenizer

    def tokenizer(self, target_name: str) -> Any:
        """The tokenizer alone, without the weights."""
        from heads.loading import load_tokenizer

        return load_tokenizer(target_name)

    def weights(self, target_name: str) -> str:
        """The identity's hash of a target that :meth:`completer` has loaded."""
        return str(self.loaded[target_name].identity().weights)


def closest(training: Sequence[str], evaluation: Sequence[str]) -> Any:
    """The most alike prompts of both sides: data's comparison for infer's ``eval``, which may not know it."""
    from data.overlap import closest as compare

    return compare(training, evaluation)


def verbs() -> Verbs:
    """All verbs of all packages.

    Raises:
        ValueError: another module of the same name stands before one of our packages on ``sys.path``.
    """
    found = Verbs()
    engine = LocalEngine()
    extra: dict[str, dict[str, Any]] = {
        "data": {"completer": engine.completer, "tokenizer": engine.tokenizer, "weights": engine.weights},
        "infer": {"closest": closest},
    }
    for package in PACKAGES:
        _refuse_shadow(package)
        importlib.import_module(f"{package}.commands").register(found.add, **extra.get(package, {}))
    return found


def _refuse_shadow(package: str) -> None:
    """A folder with its own ``train.py`` or ``data/`` on PYTHONPATH would be imported instead of ours."""
    spec = importlib.util.find_spec(package)
    where = spec.origin if spec else None
    if where is None or Path(where).resolve().parent != HERE / package:
        raise ValueError(
            f"{where or 'a folder'} hides Headstart's own package {package!r}: take its folder off PYTHONPATH, "
            "or run `headstart` from another place"
        )


def write_json(report: dict[str, Any], path: Path) -> None:
    """Write ``report`` to ``path``, whole or not at all; a number that JSON lacks (NaN, infinity) becomes null."""
    text = json.dumps(_plain(report), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of a verb. One that takes settings finds what it has no option for in ``settings``, in order;
    for others that is an error, which names the nearest option."""
    args, rest = parser.parse_known_args(argv)
    if getattr(args, "takes_settings", False):
        args.settings = rest
    elif rest:
        options = [name for action in args.verb._actions for name in action.option_strings]
        near = difflib.get_close_matches(rest[0].partition("=")[0], options, n=1)
        hint = f", did you mean {near[0]}?" if near else ""
        args.verb.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run one verb; the exit status is 0 done, 1 done but the answer is no, 2 cannot be done, 130 interrupted."""
    try:
        args = parse(verbs().parser, argv)
        if args.json is not None and not args.json.parent.is_dir():  # said before hours of work, not after
            raise FileNotFoundError(f"--json {args.json}: the folder {args.json.parent} does not exist, make it first")
        if args.json is not None and args.json.is_dir():
            raise IsADirectoryError(f"--json {args.json} is a folder: name a file in it")
        report, text = args.run(args)
        if text:
            print(text, flush=True)
        if args.json is not None:
            write_json(report, args.json)
    except (ValueError, OSError) as problem:
        print(f"error: {' '.join(str(problem).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print("error: interrupted", file=sys.stderr)
        return int(getattr(stop, "exit_status", 130))
    except Exception as stop:  # training that was asked to stop, and did: it says how it goes on
        if not hasattr(stop, "exit_status"):
            raise
        print(stop, file=sys.stderr)
        return int(stop.exit_status)
    return 0 if report.get("ok", True) else 1


if __name__ == "__main__":
    if Path(sys.path[0] or ".").resolve() != HERE:  # `python -m headstart` puts the working directory first
        del sys.path[0]
    sys.exit(main())
