"""What differs between transformers 5.17 and later ones, in one place."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import transformers
from packaging.version import Version
from transformers import PreTrainedModel

_VERSION = Version(transformers.__version__)


@lru_cache(maxsize=64)
def cache_argument(kind: type[PreTrainedModel]) -> str:
    """Name of the forward's cache argument: ``cache`` (5.24 and later) or ``past_key_values``."""
    return "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"


@lru_cache(maxsize=64)
def takes(kind: type[PreTrainedModel], argument: str) -> bool:
    """Whether the model's forward knows an argument by name."""
    return argument in inspect.signature(kind.forward).parameters


def hidden_states_argument(indices: Sequence[int]) -> bool | list[int]:
    """What to ask for so that these hidden states come back: newer versions keep only the ones named."""
    return sorted(set(indices)) if Version("5.24.0") <= _VERSION else True


def text_config(config: Any) -> Any:
    """The language model's part of a (possibly multimodal) configuration."""
    return config.get_text_config()
