"""The card of a heads repository, written from what is known about the heads and from nothing else.

A figure that nobody measured is left out, not guessed: each section appears only when the report has its entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from heads.card_measured import certified, measured, table
from heads.card_use import usage
from heads.config import HeadsConfig
from heads.embedded import NAME
from heads.reports import as_written, gather, without_places

# sections of a run's settings: what it read, and how it was trained
DATA, NO_RECIPE = "data.", ("data.", "target.", "output.", "eval.")
BUILTIN_DATA = "builtin:"


def card(
    config: HeadsConfig,
    repo_id: str,
    *,
    parameters: int,
    report: Mapping[str, Any] | None = None,
    bundle: bool = False,
    base: str | None = None,
) -> str:
    """The text of README.md, with the Hub's metadata on top.

    Args:
        config: of the heads.
        repo_id: where they will be found.
        parameters: how many numbers were trained.
        report: what was recorded, as :func:`heads.reports.gather` makes it of reports, all optional: ``evaluation``,
            ``bench``, ``certificate``, ``training``, ``data`` and ``recipe`` (text, or a mapping),
            ``draft_vocabulary`` (as a run's report.json has it), ``license``, ``target_license``, ``data_license``; or
            single figures by the keys of ``heads.card_measured.FIGURES``.
        bundle: the target lies in the same repository.
        base: of an adapter: the heads that it belongs on.
    """
    report = without_places(gather([report]) if report else {})
    training = report.get("training") or {}
    with as_written("training"):
        data, recipe, licences = _data(training), _recipe(training), _licences(report, training)
        never_drafted = _never_drafted(report)
    sections = [
        _metadata(config, repo_id, report, bundle),
        f"# {repo_id.rpartition('/')[2]}\n\n{'Draft heads' if base is None else 'An adapter of draft heads'} for "
        f"speculative decoding of {_target(config)}{', which lies in this repository' if bundle else ''}. They propose "
        "several tokens at a time; the target checks them in one pass, and the text is exactly the target's own.",
        table("Heads", _facts(config, parameters) | _adapter(config, base) | never_drafted),
        _recorded("Data", report.get("data") or data),
        _recorded("Recipe", report.get("recipe") or recipe),
        measured(report),
        certified(report.get("certificate")),
        _recorded("Licence", licences),
        usage(config, repo_id, bundle),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _metadata(config: HeadsConfig, repo_id: str, report: Mapping[str, Any], bundle: bool) -> str:
    lines = ["---", f"library_name: {'transformers' if bundle else 'headstart'}", "pipeline_tag: text-generation"]
    # where the target lies in it, a repository is under the target's licence before any other
    if licence := report.get("license") or (report.get("target_license") if bundle else None):
        lines.append(_entry("license", licence))
    if config.target.name not in (NAME, repo_id):  # the embedded target is no repository of the Hub
        lines.append(_entry("base_model", config.target.name))
    return "\n".join(
        [*lines, "tags:", "- speculative-decoding", "- draft-heads", "- custom_generate", f"- {config.kind}", "---"]
    )


def _entry(key: str, value: Any) -> str:
    """A line of metadata, whatever the value is."""
    return yaml.safe_dump({key: value}, allow_unicode=True, default_flow_style=False, width=1 << 20).strip()


def _target(config: HeadsConfig) -> str:
    revision = f" at revision `{config.target.revision}`" if config.target.revision else ""
    return f"`{config.target.name}`{revision}"


def _facts(config: HeadsConfig, parameters: int) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "target": _target(config),
        "kind": config.kind,
        "look-ahead": config.lookahead,
        "taps (indices of `hidden_states`)": ", ".join(map(str, config.taps)),
        "parameters": f"{parameters:,}",
        "target's weights (hash)": f"`{config.target.weights[:16]}`",
    }
    if config.draft_vocab_size is not None:
        facts["draft vocabulary"] = f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens"
    for key in ("quantizer", "adapter"):
        if value := getattr(config.target, key):
            facts[f"target's {key}"] = value
    return facts


def _adapter(config: HeadsConfig, base: str | None) -> dict[str, Any]:
    if config.lora is None:
        return {}
    rank, alpha, modules = (config.lora[key] for key in ("rank", "alpha", "modules"))
    layers = "all linear layers" if modules == "all" else ", ".join(f"`{name}`" for name in modules)
    facts = {"adapter": f"LoRA of rank {rank}, alpha {alpha:g}, on {layers}"}
    return facts if base is None else facts | {"belongs on": base}


def _never_drafted(report: Mapping[str, Any]) -> dict[str, Any]:
    told = report.get("draft_vocabulary") or (report.get("training") or {}).get("draft_vocabulary") or {}
    shares, names = told.get("never_drafted") or {}, {"train": "trained on", "heldout": "held out"}
    said = [f"{shares[part]:.1%} of those {name}" for part, name in names.items() if shares.get(part) is not None]
    return {"tokens of the target's answers that they can never draft": ", ".join(said)} if said else {}


def _data(training: Mapping[str, Any]) -> dict[str, Any]:
    """What a run read, and where it came from."""
    source = {key.removeprefix(DATA): value for key, value in _settings(training).items() if key.startswith(DATA)}
    return source | dict(training.get("data") or {})


def _recipe(training: Mapping[str, Any]) -> dict[str, Any]:
    rows = {key: training[key] for key in ("steps", "seconds", "processes", "versions") if training.get(key)}
    return rows | {key: value for key, value in _settings(training).items() if not key.startswith(NO_RECIPE)}


def _settings(training: Mapping[str, Any]) -> dict[str, Any]:
    """A run's settings under names with dots, those that are set."""
    found: dict[str, Any] = {}
    for key, value in (training.get("settings") or {}).items():
        section = isinstance(value, Mapping) and "." not in key
        found |= {f"{key}.{name}": item for name, item in value.items()} if section else {key: value}
    return {key: value for key, value in found.items() if value is not None}


def _licences(report: Mapping[str, Any], training: Mapping[str, Any]) -> dict[str, Any]:
    sources = str(_settings(training).get("data.train") or "").split(" + ")
    of_data = report.get("data_license")
    if of_data is None and all(source.startswith(BUILTIN_DATA) for source in sources):
        of_data = "apache-2.0 (written by the embedded target, under its licence)"
    rows = {"these heads": report.get("license"), "target": report.get("target_license"), "data": of_data}
    known = {name: licence for name, licence in rows.items() if licence}
    return {name: licence or "not recorded" for name, licence in rows.items()} if known else {}


def _recorded(title: str, entry: Any) -> str:
    if isinstance(entry, Mapping):
        return table(title, entry) if entry else ""
    return f"## {title}\n\n{entry}" if entry else ""
