"""Curves: none, tensorboard, wandb or trackio, through accelerate, without secrets and without questions."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from train.config import RunConfig
from train.settings import to_dict

SECRET_NAME = re.compile(r"(^|_)(token|key|secret|password|passwd|credentials?)$", re.IGNORECASE)
IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+@")
HIDDEN = "(hidden)"


def without_secrets(value: Any, environ: Mapping[str, str] = os.environ) -> Any:
    """``value`` with secrets hidden: under a secret's name, equal to one of the environment, or in an address."""
    secrets = {text for name, text in environ.items() if SECRET_NAME.search(name) and len(text) >= 8}
    return _hide(value, secrets)


def _hide(value: Any, secrets: set[str]) -> Any:
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if isinstance(item, str) and SECRET_NAME.search(str(key)) else _hide(item, secrets)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_hide(item, secrets) for item in value]
    if not isinstance(value, str):
        return value
    for secret in secrets:
        value = value.replace(secret, HIDDEN)
    return IN_ADDRESS.sub(f"{HIDDEN}@", value)


def _tensorboard(config: RunConfig) -> dict[str, Any]:
    return {}


def _wandb(config: RunConfig) -> dict[str, Any]:
    if not (os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") or _has_login()):
        os.environ["WANDB_MODE"] = "offline"  # it would ask for a key
        print("tracker: wandb has no key here, so it records offline (`wandb sync` uploads)", file=sys.stderr)
    return {"name": _run_name(config), "dir": config.output.folder}


def _has_login() -> bool:
    netrc = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    return netrc.is_file() and "wandb" in netrc.read_text(encoding="utf-8", errors="replace")


def _trackio(config: RunConfig) -> dict[str, Any]:
    return {"name": _run_name(config)}


def _run_name(config: RunConfig) -> str:
    return config.tracker.run or Path(config.output.folder).resolve().name


SETUP = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}


def check_tracker(config: RunConfig) -> None:
    """Before anything long begins.

    Raises:
        ValueError: the tracker's package is not installed.
    """
    kind = config.tracker.kind
    if kind != "none" and importlib.util.find_spec(kind) is None:
        raise ValueError(f"tracker.kind is {kind}, which is not installed: pip install 'headstart[{kind}]'")


def begin(accelerator: Accelerator, config: RunConfig) -> None:
    """Open the tracker on the main process with the run's settings."""
    kind = config.tracker.kind
    if kind == "none":
        return
    flat = {
        f"{section}.{key}": value if isinstance(value, (int, float, str, bool)) else str(value)
        for section, values in without_secrets(to_dict(config)).items()
        for key, value in values.items()
    }
    options = SETUP[kind](config) if accelerator.is_main_process else {}
    accelerator.init_trackers(config.tracker.project, config=flat, init_kwargs={kind: options})
