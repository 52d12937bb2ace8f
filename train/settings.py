"""Reading a :class:`train.config.RunConfig` from YAML and the command line, strictly.

YAML scalars are read as plain text and converted here by the type of the setting, so that ``lr: 5e-5`` is a
number (in YAML 1.1 it is a string), ``seed: 010`` is ten, and the command line follows the very same rules.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from train.config import RunConfig

TRUE, FALSE, NULL = {"true", "yes", "on"}, {"false", "no", "off"}, {"null", "none", "~", ""}
# Names other trainers use; only for the hint in an error.
SYNONYMS = {"learning_rate": "lr", "num_train_epochs": "epochs", "batch_size": "batch_tokens", "output_dir": "folder"}


class SettingsError(ValueError):
    """A setting that does not exist or has no usable value; says which, where, and what would do."""


class _Text(yaml.BaseLoader):
    """Scalars stay text; a key given twice is an error instead of the last one winning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise SettingsError(f"line {node.start_mark.line + 1}: {key!r} is given more than once")
        return super().construct_mapping(node, deep)


def suggest(name: str, known: Iterable[str]) -> str:
    """``did you mean …?`` with the nearest of ``known``; compares last parts too, and other trainers' names."""
    spelled = {key: key for key in known}
    spelled |= {key.rsplit(".", 1)[-1]: key for key in spelled}
    spelled |= {other: spelled[own] for other, own in SYNONYMS.items() if own in spelled}
    found = difflib.get_close_matches(name, spelled, 1, 0.5) or difflib.get_close_matches(
        name.rsplit(".", 1)[-1], spelled, 1, 0.0
    )
    return f"did you mean {spelled[found[0]]}?" if found else f"known: {', '.join(sorted(set(spelled.values())))}"


def fields_of(section: type) -> dict[str, tuple[Any, dataclasses.Field[Any]]]:
    """Name → (type, field) of a section's settings."""
    hints = typing.get_type_hints(section)
    return {item.name: (hints[item.name], item) for item in dataclasses.fields(section)}


SECTIONS: dict[str, type] = {name: kind for name, (kind, _) in fields_of(RunConfig).items()}
KEYS = [f"{section}.{name}" for section, kind in SECTIONS.items() for name in fields_of(kind)]


def _boolean(text: str) -> bool:
    if text.lower() not in TRUE | FALSE:
        raise ValueError("true or false is wanted")
    return text.lower() in TRUE


CONVERT: dict[Any, Any] = {bool: _boolean, int: lambda text: int(text.replace("_", "")), float: float, str: str}


def free(value: Any) -> Any:
    """A value without a declared type (``heads.options``): null, boolean, integer, float or text, in that order."""
    if isinstance(value, Mapping):
        return {key: free(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [free(item) for item in value]
    if not isinstance(value, str):
        return value
    if value.lower() in NULL:
        return None
    for kind in (bool, int, float):
        try:
            return CONVERT[kind](value)
        except ValueError:
            continue
    return value


def convert(value: Any, wanted: Any) -> Any:
    """``value`` (text, list or mapping) as the type ``wanted``.

    Raises:
        ValueError: it is not one.
    """
    if typing.get_origin(wanted) in (types.UnionType, typing.Union):
        if value is None or (isinstance(value, str) and value.lower() in NULL):
            return None
        return convert(value, next(kind for kind in typing.get_args(wanted) if kind is not type(None)))
    if typing.get_origin(wanted) is tuple:
        items = value.strip("[]").replace(",", " ").split() if isinstance(value, str) else value
        if not isinstance(items, Sequence):
            raise ValueError("a list is wanted")
        return tuple(convert(item, typing.get_args(wanted)[0]) for item in items)
    if typing.get_origin(wanted) is dict:
        if isinstance(value, str) and value.startswith("{"):  # as a command line has it: {soft_ce: 0.1, tv: 1.8}
            try:
                value = yaml.load(value, Loader=_Text)
            except yaml.YAMLError as error:
                raise ValueError(f"it is no YAML: {error}") from None
        if not isinstance(value, Mapping):
            raise ValueError("a mapping is wanted")
        inner = typing.get_args(wanted)[1]
        return {key: free(item) if inner is Any else convert(item, inner) for key, item in value.items()}
    if not isinstance(value, str):
        raise ValueError(f"one value is wanted, not {type(value).__name__}")
    return CONVERT[wanted](value)


def read_yaml(path: Path) -> dict[str, dict[str, Any]]:
    """Sections of a recipe as text.

    Raises:
        SettingsError: not YAML, a key twice, or a section that is not a mapping.
        OSError: the file cannot be read.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Text) or {}
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not UTF-8 text: {error}") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"{path} is not valid YAML: {error}") from None
    except SettingsError as error:
        raise SettingsError(f"{path}, {error}") from None
    if not isinstance(content, Mapping):
        raise SettingsError(f"{path}: a recipe is a mapping of sections ({', '.join(SECTIONS)})")
    for section, values in content.items():
        if section not in SECTIONS:
            raise SettingsError(f"{path}: unknown section {section!r}: {suggest(section, [*SECTIONS, *KEYS])}")
        if values != "" and not isinstance(values, Mapping):
            raise SettingsError(f"{path}: {section} must be a mapping of settings, not {values!r}")
    return {section: dict(values or {}) for section, values in content.items()}


def override(sections: dict[str, dict[str, Any]], arguments: Sequence[str]) -> None:
    """Put ``--section.key value`` (or ``=value``) pairs over what the file said, in place.

    ``--section.key.name value`` sets one entry of a mapping such as ``train.loss``, ``--section.key {name: value}`` the
    whole of it.
    """
    pending = list(arguments)
    while pending:
        word = pending.pop(0)
        name, has_value, value = word.removeprefix("--").partition("=")
        section, _, key = name.partition(".")
        key, _, entry = key.partition(".")
        if not word.startswith("--") or section not in SECTIONS or key not in fields_of(SECTIONS[section]):
            raise SettingsError(f"command line: unknown setting {word!r}: {suggest(name, KEYS)}")
        if not has_value:
            if not pending or pending[0].startswith("--"):
                wants = "false" if fields_of(SECTIONS[section])[key][0] is bool else "VALUE"
                raise SettingsError(f"command line: {word} needs a value, as in `{word} {wants}`")
            value = pending.pop(0)
        values = sections.setdefault(section, {})
        if entry:
            known = values[key] if key in values else getattr(SECTIONS[section](), key)
            if not isinstance(known, Mapping):
                raise SettingsError(f"command line: {section}.{key} has no entries, so {word} cannot be set")
            values[key] = {name: item if isinstance(item, str) else str(item) for name, item in known.items()} | {
                entry: value
            }
        else:
            values[key] = value


WITHIN = {"or more": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}


def outside(value: Any, bounds: Mapping[str, float | None]) -> str:
    """What a number has to be, in words; empty where it is that, and for what is no number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return ""
    if not math.isfinite(value):
        return "finite"
    given = {word: bound for word, bound in bounds.items() if bound is not None}
    if all(WITHIN[word](value, bound) for word, bound in given.items()):
        return ""
    words = (f"{bound:.15g} or more" if word == "or more" else f"{word} {bound:.15g}" for word, bound in given.items())
    return " and ".join(words)


def build(sections: Mapping[str, Mapping[str, Any]], where: str) -> RunConfig:
    """Typed settings from text; ``where`` (the file's name) opens each error.

    Raises:
        SettingsError: unknown key (nearest name given), or a value that is not of the setting's type or choices.
    """
    made = {}
    for section, values in sections.items():
        known = fields_of(SECTIONS[section])
        typed = {}
        for key, value in values.items():
            name = f"{section}.{key}"
            if key not in known:
                raise SettingsError(
                    f"{where}: unknown setting {name}: {suggest(key, [f'{section}.{one}' for one in known])}"
                )
            wanted, item = known[key]
            try:
                typed[key] = convert(value, wanted)
            except (ValueError, KeyError) as error:
                raise SettingsError(f"{where}: {name} cannot be {value!r}: {error}") from None
            choices = item.metadata["choices"]
            if choices and typed[key] not in choices:
                raise SettingsError(f"{where}: {name} is {typed[key]!r}, but may be {', '.join(choices)}")
            if wanted is str and not typed[key].strip():
                raise SettingsError(f"{where}: {name} is empty: give it a value, or leave it out")
            limits = outside(typed[key], item.metadata["bounds"])
            if limits:
                raise SettingsError(f"{where}: {name} is {typed[key]}, it must be {limits}")
        made[section] = SECTIONS[section](**typed)
    return RunConfig(**made)


def parse(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The recipe's name (the quickstart's by default) and the other arguments.

    Raises:
        SettingsError: ``--config`` without a name, or twice.
    """
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    if "--config" not in words:
        return "quickstart.yaml", words
    at = words.index("--config")
    name, rest = words[at + 1 : at + 2], words[:at] + words[at + 2 :]
    if not name or "--config" in rest:
        raise SettingsError("command line: --config needs one recipe, as in `--config configs/quickstart.yaml`")
    return name[0], rest


def load(path: Path, arguments: Sequence[str] = ()) -> RunConfig:
    """The recipe at ``path`` with the command line's settings over it."""
    sections = read_yaml(path)
    build(sections, str(path))  # so that a fault of the file is told as the file's
    override(sections, arguments)
    return build(sections, f"{path} with the command line")


def describe(defaults: RunConfig) -> str:
    """A line for each setting: name, value in the recipe, help."""
    lines = []
    for section, kind in SECTIONS.items():
        for name, (_, item) in fields_of(kind).items():
            value = getattr(getattr(defaults, section), name)
            choices = f" ({' | '.join(item.metadata['choices'])})" if item.metadata["choices"] else ""
            lines.append(f"  --{section}.{name} {value!s}\n        {item.metadata['help']}{choices}")
    return "\n".join(lines)


def to_dict(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Plain nested values, as YAML and trackers take them."""
    return {
        section: {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        for section, values in dataclasses.asdict(config).items()
    }


def to_yaml(config: RunConfig) -> str:
    """The effective settings; :func:`load` reads them back to an equal config."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)
