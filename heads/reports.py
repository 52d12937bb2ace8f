"""What was measured, out of the reports that this project's verbs write with ``--json``: all that a card may say.

A report is known by its keys. One that says which weights it is of (``eval``, ``bench``, ``verify``) is refused for
others, so that no card carries figures of heads that have been trained again since.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from heads.config import HeadsConfig
from heads.embedded import NAME

# part of the card's material → the keys by which a report of that kind is known
PARTS: dict[str, frozenset[str]] = {
    "evaluation": frozenset({"budgets", "settings"}),  # eval --json
    "bench": frozenset({"arms", "speedup"}),  # bench --json
    "certificate": frozenset({"greedy", "sampled"}),  # verify's certificate.json
    "training": frozenset({"steps", "data", "settings"}),  # a run's report.json
}
WRITTEN_BY = {
    "evaluation": "`headstart eval --json`",
    "bench": "`headstart bench --json`",
    "certificate": "`headstart verify`",
    "training": "a training run",
}
SAID = {
    "data",
    "recipe",
    "license",
    "target_license",
    "data_license",
    "draft_vocabulary",
    "accepted_per_position",
    "tokens_per_round",
    "tokens_per_round_tree",
    "speedup",
    "greedy_identical",
    "prompts",
}
OF_WEIGHTS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "evaluation": lambda report: report.get("heads_sha256"),
    "bench": lambda report: report.get("heads_sha256"),
    "training": lambda report: report.get("heads_sha256"),
    "certificate": lambda report: (report.get("heads") or {}).get("sha256"),
}


def read_reports(paths: Iterable[Path]) -> list[Mapping[str, Any]]:
    """The JSON objects of some files.

    Raises:
        ValueError: a file is no JSON object.
        OSError: it cannot be read.
    """
    found: list[Mapping[str, Any]] = []
    for path in paths:
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as problem:
            raise ValueError(f"{path} is not JSON: {str(problem)[:200]}") from None
        if not isinstance(report, dict):
            raise ValueError(f"{path} must hold a JSON object, not a {type(report).__name__}")
        found.append(report)
    return found


def gather(reports: Sequence[Mapping[str, Any]], digest: str | None = None) -> dict[str, Any]:
    """One dict of all reports, later ones over earlier ones: ``PARTS`` as they were written, and the keys ``SAID``.

    Args:
        reports: of the verbs, or any mapping with keys of ``PARTS`` and ``SAID`` (a quickstart's summary).
        digest: SHA-256 of the weights that the card is of; None to believe every report.

    Raises:
        ValueError: a report is of other weights, or holds nothing that a card says.
    """
    found: dict[str, Any] = {}
    for report in reports:
        part = next((name for name, keys in PARTS.items() if keys <= report.keys()), None)
        used = {part: report} if part else {key: report[key] for key in report.keys() & (PARTS.keys() | SAID)}
        if not used:
            raise ValueError(
                f"a report with the keys {', '.join(sorted(report)) or 'none'} holds nothing that a card says: give "
                "what eval, bench or verify wrote with --json, a run's report.json, or a quickstart's summary.json"
            )
        for name, entry in used.items():
            if name in PARTS and entry is not None and not isinstance(entry, Mapping):
                raise ValueError(f"the {name} report must be a JSON object, not a {type(entry).__name__}")
            _check_weights(name, entry, digest)
            if name in PARTS and isinstance(entry, Mapping) and name in found:
                found[name] = found[name] | entry  # a summary has but a part of what the run itself reported
            elif entry is not None:
                found[name] = entry
    return found


@contextmanager
def as_written(part: str) -> Iterator[None]:
    """Around what reads a report, which may be another version's or edited by hand.

    Raises:
        ValueError: it lacks what the card says of it, or has it in another form.
    """
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, StopIteration) as problem:
        form = f"as {WRITTEN_BY[part]} writes it" if part in WRITTEN_BY else "of a form that a card can show"
        what = f"it lacks {problem}" if isinstance(problem, KeyError) else f"{type(problem).__name__} {problem}".strip()
        raise ValueError(f"the report's {part} is not {form} ({what}): measure again, or leave it out") from None


def _check_weights(name: str, entry: Any, digest: str | None) -> None:
    with as_written(name):
        said = OF_WEIGHTS[name](entry) if name in OF_WEIGHTS and isinstance(entry, Mapping) else None
    if digest is not None and said not in (None, digest):
        raise ValueError(
            f"the {name} report is of other weights ({str(said)[:12]}… there, {digest[:12]}… here): measure these "
            "heads again, or leave it out"
        )


def published(report: Mapping[str, Any], repo_id: str, config: HeadsConfig, licence: str | None) -> dict[str, Any]:
    """The same as others may read it: the heads and their target by the names that they have on the Hub.

    Args:
        licence: the target's, as its repository states it.
    """
    found = dict(report)
    if config.target.name == NAME:
        licence = "apache-2.0"  # as the package that carries it states
    if licence is not None:
        found.setdefault("target_license", licence)
    if (certificate := found.get("certificate")) is not None:
        with as_written("certificate"):
            named = {part: certificate[part] | {"name": name} for part, name in _names(repo_id, config).items()}
        found["certificate"] = certificate | named
    return found


def _names(repo_id: str, config: HeadsConfig) -> dict[str, str]:
    return {"heads": repo_id, "target": config.target.name}


def without_places(value: Any) -> Any:
    """Text without the folders of the machine it was written on: an absolute path becomes its last part."""
    if isinstance(value, str):
        return ", ".join(Path(part).name if part.startswith("/") else part for part in value.split(", "))
    if isinstance(value, Mapping):
        return {key: without_places(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_places(item) for item in value]
    return value
