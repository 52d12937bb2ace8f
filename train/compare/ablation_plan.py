"""The file that says which ablations there are (``configs/compare/ablations.yaml``), read strictly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from heads.config import nearest
from train.compare.starts import STARTS

EQUAL = ("tokens", "time")


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        name: in its group.
        recipe: of configs/; the plan's unless it or its group names another.
        set: settings over the recipe's, ``section.key`` → value.
        conversations: train on so many of the data, evenly spread; None for all.
        init: a row of ``train.compare.starts.STARTS``; None for what the kind does itself.
        data: another set of conversations, by the name it is given on the command line.
        at: its place on the group's axis.
    """

    name: str
    recipe: str
    set: tuple[tuple[str, str], ...] = ()
    conversations: int | None = None
    init: str | None = None
    data: str | None = None
    at: float | None = None

    @property
    def content(self) -> dict[str, Any]:
        """What tells it from other trainings: all but how its group shows it."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("name", "at")}


@dataclass(frozen=True)
class Group:
    """Runs that answer one question; the first is what the others are held against."""

    name: str
    asks: str
    runs: tuple[Run, ...]
    axis: str | None = None


@dataclass(frozen=True)
class Ablations:
    """The whole file.

    Attributes:
        config: the recipe whose data, target, batches and seed all share.
        minutes: of training, of a run of that recipe.
        equal: "tokens": all take as many steps as it does in that time; "time": each as many as it can itself.
    """

    config: str
    minutes: float
    equal: str
    groups: tuple[Group, ...]


def read(path: Path) -> Ablations:
    """The file.

    Raises:
        ValueError: it holds something else, with the place.
        OSError: there is no such file.
    """
    whole = yaml.safe_load(path.read_text(encoding="utf-8"))
    _only(whole, ("config", "minutes", "equal", "groups"), str(path))
    config, minutes, equal = whole.get("config"), whole.get("minutes", 5), whole.get("equal", "tokens")
    if equal not in EQUAL or not isinstance(minutes, int | float) or not minutes > 0:
        raise ValueError(f"{path}: minutes is a number above 0 and equal one of {', '.join(EQUAL)}")
    if not isinstance(config, str) or not isinstance(whole.get("groups"), dict) or not whole["groups"]:
        raise ValueError(f"{path}: config names a recipe, and groups has one group or more")
    groups = tuple(_group(name, found, config, f"{path}, {name}") for name, found in whole["groups"].items())
    return Ablations(config, float(minutes), equal, groups)


def some(plan: Ablations, only: list[str]) -> Ablations:
    """The groups named; all where none is.

    Raises:
        ValueError: there is no such group.
    """
    known = [group.name for group in plan.groups]
    for name in only:
        if name not in known:
            raise ValueError(f"--only {name}: the groups are {', '.join(known)}{nearest(name, known)}")
    return replace(plan, groups=tuple(group for group in plan.groups if not only or group.name in only))


def _group(name: str, found: Any, config: str, where: str) -> Group:
    _only(found, ("asks", "recipe", "axis", "runs"), where)
    if not isinstance(found.get("asks"), str) or not isinstance(found.get("runs"), list) or len(found["runs"]) < 2:
        raise ValueError(f"{where}: asks is its question, and runs has two or more")
    runs = tuple(_run(one, found.get("recipe", config), where) for one in found["runs"])
    if len({run.name for run in runs}) < len(runs):
        raise ValueError(f"{where}: two runs have one name")
    if found.get("axis") and any(run.at is None for run in runs):
        raise ValueError(f"{where}: it has an axis, so each run needs its place on it, `at`")
    return Group(str(name), found["asks"], runs, found.get("axis"))


def _run(found: Any, recipe: str, where: str) -> Run:
    _only(found, tuple(field.name for field in fields(Run)), where)
    if "name" not in found:
        raise ValueError(f"{where}: a run has no name: {found}")
    where = f"{where}, {found['name']}"
    settings = found.get("set", {})
    if not isinstance(settings, dict):
        raise ValueError(f"{where}: set holds settings, as in {{heads.lookahead: 5}}")
    if (init := found.get("init")) is not None and init not in STARTS:
        raise ValueError(f"{where}: init may be {', '.join(STARTS)}{nearest(str(init), STARTS)}")
    count = found.get("conversations")
    if count is not None and (not isinstance(count, int) or count < 1):
        raise ValueError(f"{where}: conversations is a count of 1 or more")
    written = tuple((str(key), _written(value)) for key, value in settings.items())
    more = {key: found[key] for key in ("data", "at") if key in found}
    return Run(str(found["name"]), found.get("recipe", recipe), written, count, init, **more)


def _written(value: Any) -> str:
    """A setting as the command line has it."""
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).strip().removesuffix("...").strip()


def _only(found: Any, known: tuple[str, ...], where: str) -> None:
    if not isinstance(found, Mapping):
        raise ValueError(f"{where}: expected names with values, found {found!r:.60}")
    for key in found:
        if key not in known:
            raise ValueError(f"{where}: there is no {key!r} ({', '.join(known)}){nearest(str(key), known)}")
