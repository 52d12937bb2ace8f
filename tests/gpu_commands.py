"""Whether a command of ``gpu_check.py`` is one: its files are there, and each program on it takes its options."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from train.settings import load, parse

Launched = tuple[str, list[str]]
"""The script that a launcher would start, and the script's arguments."""


def check_command(words: Sequence[str], root: Path) -> None:
    """Go through ``INTERPRETER [-m LAUNCHER OPTION …] SCRIPT --config RECIPE [--SECTION.KEY VALUE …]``.

    Args:
        root: the folder that the command is run in.

    Raises:
        ValueError, OSError: a file is missing, or an option is unknown or has no such value.
    """
    interpreter, *rest = words
    if not Path(interpreter).is_file():
        raise FileNotFoundError(f"there is no interpreter {interpreter}")
    script, arguments = _launched(rest, root)
    if not (root / script).is_file():
        raise FileNotFoundError(f"there is no script {script}")
    recipe, settings = parse(arguments)
    load(root / recipe, settings)


def _launched(words: list[str], root: Path) -> Launched:
    if words[0] != "-m":
        return words[0], words[1:]
    module = words[1]
    if module not in LAUNCHERS or importlib.util.find_spec(module) is None:
        raise ValueError(f"{module} is no launcher here (known: {', '.join(LAUNCHERS)})")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return LAUNCHERS[module](words[2:], root)
    except SystemExit:  # argparse's way to refuse
        raise ValueError(f"{module} does not take {' '.join(words[2:])}: {said.getvalue().strip()[-300:]}") from None


def _accelerate(words: list[str], root: Path) -> Launched:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    args = launch_command_parser().parse_args(words)
    config: Any = load_config_from_file(str(root / args.config_file))
    deepspeed = (config.deepspeed_config or {}).get("deepspeed_config_file")
    if deepspeed is not None:
        json.loads((root / deepspeed).read_text(encoding="utf-8"))
    return args.training_script, args.training_script_args


def _torchrun(words: list[str], root: Path) -> Launched:
    from torch.distributed.run import parse_args

    args = parse_args(words)
    return args.training_script, args.training_script_args


LAUNCHERS: dict[str, Callable[[list[str], Path], Launched]] = {
    "accelerate.commands.launch": _accelerate,
    "torch.distributed.run": _torchrun,
}
