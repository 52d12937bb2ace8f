"""Bundles: heads and their target in one folder or repository, so that there are no separate weights to manage.

The root is the target as transformers saves it, and loads as such anywhere; ``heads/`` is a folder of heads. See
:mod:`heads.layout`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from heads.base import DraftHeads
from heads.layout import CODE, CONFIG, HEADS, target_files
from heads.target import Target


def save_bundle(heads: DraftHeads, folder: str | Path, *, tokenizer: Any = None) -> None:
    """Write target, tokenizer and heads into a new folder, whole or not at all; the target in the dtype it is in.

    Args:
        folder: a new one; nothing is overwritten.
        tokenizer: the target's, where its name does not lead to one; False for a bundle without.

    Raises:
        ValueError: the target is adapted, runs code of its own, or has no tokenizer that can be found.
        OSError: the folder holds something, or the disk refused.
    """
    from heads.formats.folder import new_folder

    target = heads.target
    _check_target(target)
    tokenizer = _tokenizer_of(target) if tokenizer is None else tokenizer
    with new_folder(Path(folder)) as partial:
        target.model.save_pretrained(partial)
        _forget_where_it_lay(partial / CONFIG)
        if tokenizer is not False:
            tokenizer.save_pretrained(partial)
        target_files(partial)  # what a push would take is whole
        heads.save_pretrained(partial / HEADS)
        write_code(partial)


def write_code(folder: Path) -> None:
    """Put the code for plain transformers into a local bundle, where ``trust_remote_code`` finds it."""
    (folder / CODE).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(__file__).parent / CODE, folder / CODE)


def _check_target(target: Target) -> None:
    name, config = target.name, target.model.config
    if target.identity().adapter is not None:
        raise ValueError(f"{name} carries an adapter, and a bundle holds plain weights: merge it, train heads on that")
    if target.identity().quantizer is not None:
        raise ValueError(f"{name} is quantized, and a bundle holds plain weights: push the heads alone")
    if getattr(config, "auto_map", None):
        raise ValueError(f"{name} runs code of its own, which a bundle does not carry: push the heads alone")


def _tokenizer_of(target: Target) -> Any:
    try:
        return target.tokenizer()
    except (OSError, ValueError) as problem:
        raise ValueError(f"no tokenizer is found for {target.name} ({problem}): pass tokenizer=") from None


def _forget_where_it_lay(config: Path) -> None:
    """A folder of this machine is nobody else's business."""
    stored = json.loads(config.read_text(encoding="utf-8"))
    if stored.pop("_name_or_path", None) is not None:
        config.write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
