"""Loading a target's model, whole: transformers fills in weights that its files lack with random numbers."""

from __future__ import annotations

from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

from heads import embedded


def load_model(
    name: str, *, dtype: torch.dtype | Literal["auto"], revision: str | None, trust_remote_code: bool, **options: Any
) -> Any:
    """The model of the embedded target's name, a folder, or a Hub id; dtype "auto" is the one it is stored in.

    Args:
        options: further ones of transformers' ``from_pretrained``.

    Raises:
        ValueError: its files lack weights; what they have instead is listed.
    """
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        embedded.resolve(name),
        dtype=dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
        **options,
    )
    model, found = loaded
    if found["missing_keys"]:
        raise ValueError(_incomplete(name, model, found))
    return model


def _incomplete(name: str, model: Any, found: dict[str, Any]) -> str:
    """What is said of files that lack weights."""
    missing, unknown = sorted(found["missing_keys"]), sorted(found["unexpected_keys"])
    there = sorted(key for key in model.state_dict() if key not in found["missing_keys"])
    others = f", and {_some(unknown)}, which no part of it takes" if unknown else ""
    return (
        f"the files of {name} lack {_some(missing)}, so it would decode with made-up weights; there are "
        f"{_some(there)}{others}: complete the files, or correct tie_word_embeddings in its config"
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
