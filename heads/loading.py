"""Loading a target's model, whole, by its name; one message when it cannot be had.

transformers fills in weights that its files lack with random numbers: such a model is refused.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer

from heads import embedded
from heads.hub import REPO_ID, HubError, one_message
from heads.layout import SHARDS, TARGET, broken

# what broken files make transformers raise, for reasons that do not name them
PUZZLED = (SafetensorError, ValueError, TypeError, AttributeError, KeyError, OSError)


def load_model(
    kind: Any,
    name: str,
    *,
    dtype: torch.dtype | Literal["auto"] = torch.bfloat16,
    revision: str | None = None,
    trust_remote_code: bool = False,
    **access: Any,
) -> Any:
    """A model of transformers.

    Args:
        kind: transformers' class of such models.
        name: the embedded target's, a folder, or a Hub id.
        dtype: "auto" is the one it is stored in.
        revision, trust_remote_code: as transformers takes them.
        access: how to reach it: ``token``, ``cache_dir``, ``local_files_only``; and further arguments of transformers'
            ``from_pretrained``.

    Raises:
        ValueError: its files lack weights; what they have instead is listed.
        FileNotFoundError: the name can only be a folder's, and there is none.
        HubError: no such repository or revision, it is gated or private, or it is neither cached nor reachable.
        OSError: a folder or repository holds no whole model.
    """
    place = _named(name)
    if access.get("local_files_only"):  # transformers would ask for an adapter all the same
        access["adapter_kwargs"] = {"local_files_only": True}
    try:
        with one_message(place, access.get("token"), revision):
            model, found = kind.from_pretrained(
                place,
                dtype=dtype,
                revision=revision,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **access,
            )
    except PUZZLED as problem:
        if (wrong := _broken_file(place)) is not None:
            raise OSError(f"{wrong}: the model there is not whole, copy or fetch it again") from problem
        if isinstance(problem, SafetensorError):
            raise OSError(f"the weights of {place} are not whole ({problem}): fetch them again") from problem
        raise
    if found["missing_keys"]:
        raise ValueError(_incomplete(name, model, found))
    return model


def load_tokenizer(name: str | Path, *, revision: str | None = None, **access: Any) -> Any:
    """The tokenizer that lies beside a model; arguments as of :func:`load_model`.

    Raises:
        FileNotFoundError, HubError: see :func:`load_model`.
        ValueError: there is none, or it is broken.
    """
    place = _named(str(name))
    if revision is not None:
        access["revision"] = revision
    try:
        with one_message(place, access.get("token"), revision):
            return AutoTokenizer.from_pretrained(place, **access)
    except HubError:
        raise
    except Exception as problem:  # broken files show as one of many types, by library
        told = _broken_file(place) or " ".join(str(problem).split())[:300]
        raise ValueError(f"{name} has no tokenizer that can be read ({told})") from problem


def _named(name: str) -> str:
    place = embedded.resolve(name)
    if not os.path.isdir(place) and not REPO_ID.fullmatch(place):
        raise FileNotFoundError(f"there is no folder {place}, and it is no Hub id (ORG/NAME) either")
    return place


def _broken_file(place: str) -> str | None:
    """What is wrong with a file of a model's folder, where one cannot be read."""
    if not os.path.isdir(place):
        return None
    return broken(Path(place), [*TARGET, *sorted(path.name for path in Path(place).glob(SHARDS))])


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
