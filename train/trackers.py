"""Curves: none, tensorboard, wandb or trackio, through accelerate, without secrets and without questions."""

from __future__ import annotations

import importlib.util
import os
import re
import sqlite3
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Launch:
    """What a tracker is told of this launch of a run.

    Attributes:
        run_id: the run's own, through all its launches.
        again: whether the run was launched before.
        step: the one it goes on from; what was tracked beyond it is tracked again.
    """

    run_id: str
    again: bool
    step: int


def _tensorboard(config: RunConfig, launch: Launch) -> dict[str, Any]:
    return {"purge_step": launch.step + 1} if launch.again else {}


def _wandb(config: RunConfig, launch: Launch) -> dict[str, Any]:
    """The same run again; what it holds of repeated steps stays, which is what would be tracked."""
    local = os.environ.get("WANDB_MODE", "").lower() in ("offline", "disabled", "dryrun")
    if not (local or os.environ.get("WANDB_API_KEY") or _has_login()):
        os.environ["WANDB_MODE"] = "offline"  # it would ask for a key
        print("tracker: wandb has no key here, so it records offline (`wandb sync` uploads)", file=sys.stderr)
    again = {"resume": "allow"} if launch.again else {}
    return {"name": _run_name(config), "dir": config.output.folder, "id": launch.run_id, **again}


def _has_login() -> bool:
    netrc = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    return netrc.is_file() and "wandb" in netrc.read_text(encoding="utf-8", errors="replace")


def _trackio(config: RunConfig, launch: Launch) -> dict[str, Any]:
    if launch.again:
        _cut_trackio(config.tracker.project, _run_name(config), launch.step)
    return {"name": _run_name(config), "resume": "allow" if launch.again else "never"}


def _cut_trackio(project: str, run: str, step: int) -> None:
    """Delete what a run tracked after a step, where its rows lie on this machine."""
    from trackio.sqlite_storage import SQLiteStorage

    path = Path(SQLiteStorage.get_project_db_path(project))
    if path.is_file():
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("delete from metrics where run_name = ? and step > ?", (run, step))


def _run_name(config: RunConfig) -> str:
    return str(without_secrets(config.tracker.run or Path(config.output.folder).resolve().name))


SETUP: dict[str, Callable[[RunConfig, Launch], dict[str, Any]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
}


def check_tracker(config: RunConfig) -> None:
    """Before anything long begins.

    Raises:
        ValueError: the tracker's package is not installed.
    """
    kind = config.tracker.kind
    if kind != "none" and importlib.util.find_spec(kind) is None:
        raise ValueError(f"tracker.kind is {kind}, which is not installed: pip install -e '.[{kind}]' in the clone")


def begin(accelerator: Accelerator, config: RunConfig, launch: Launch) -> None:
    """Open the tracker on the main process with the run's settings."""
    kind = config.tracker.kind
    if kind == "none":
        return
    flat = {
        f"{section}.{key}": value if isinstance(value, (int, float, str, bool)) else str(value)
        for section, values in without_secrets(to_dict(config)).items()
        for key, value in values.items()
    }
    options = SETUP[kind](config, launch) if accelerator.is_main_process else {}
    accelerator.init_trackers(config.tracker.project, config=flat, init_kwargs={kind: options})


def close(accelerator: Accelerator) -> None:
    """Write out what is still under way: a process of several ends at once, and would lose it."""
    for tracker in accelerator.trackers:
        tracker.finish()
