"""What differs between transformers 5.17 and later ones, in one place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import PreTrainedModel

_VERSION = Version(transformers.__version__)


@lru_cache(maxsize=64)
def cache_argument(kind: type[PreTrainedModel]) -> str:
    """Name of the forward's cache argument: ``cache`` (5.24 and later) or ``past_key_values``.

    Raises:
        ValueError: it has none, and would swallow a cache silently.
    """
    known = inspect.signature(kind.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in known:
            return name
    raise ValueError(f"{kind.__name__} keeps no keys and values between passes: it is not supported as a target")


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


# attention that goes by a key's place in the cache, whatever its position → how a configuration shows it
BY_PLACE: dict[str, Callable[[Any], bool]] = {
    "ALiBi biases": lambda config: bool(getattr(config, "alibi", False)) or config.model_type in ("bloom", "mpt"),
    "local windows": lambda config: "local" in (getattr(config, "attention_layers", None) or ()),  # GPT-Neo
    "attention chunks": lambda config: "chunked_attention" in (getattr(config, "layer_types", None) or ()),
}


def by_place(config: Any) -> str | None:
    """What of a model's attention counts places instead of positions; None for nothing.

    In a tree two siblings share a position and not a place, so such a model can verify chains only.
    """
    return next((what for what, shows in BY_PLACE.items() if shows(config)), None)


def rotary_border(config: Any) -> int | None:
    """Length beyond which a LongRoPE model turns all positions of a pass by other factors; None without one.

    Keys of one text are then from before and behind the border, as the passes happened to be cut.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [rope] if "rope_type" in rope else [part for part in rope.values() if isinstance(part, dict)]
    own = getattr(config, "original_max_position_embeddings", None)
    borders = [
        part.get("original_max_position_embeddings", own) for part in parts if part.get("rope_type") == "longrope"
    ]
    return min((border for border in borders if border), default=None)


def mixes_rows(model: nn.Module) -> str | None:
    """Name of a layer whose rows depend on the other rows of their pass, as no verified draft may; None for none.

    PyTorch's dynamic int8 layers scale activations by the largest one of the whole pass, and bitsandbytes' int8 ones
    take columns out of the product in which any row of the pass has an outlier.
    """
    for name, module in model.named_modules():
        if type(module).__name__ == "Linear8bitLt" and getattr(getattr(module, "state", None), "threshold", None):
            return name
        dynamic = type(module).__module__.startswith("torch.ao.nn.quantized.dynamic") and hasattr(module, "weight")
        if dynamic and module.weight().dtype is torch.qint8:
            return name
    return None


def stored(model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters and buffers by name as they are held, with what a quantizer holds beside them.

    bitsandbytes unpacks 4-bit weights that it had packed for a processor before it tells them, and leaves their scales
    transposed: the next pass would compute with others. So it is made to think that they are not packed.
    """
    states = [getattr(getattr(module, "weight", None), "quant_state", None) for module in model.modules()]
    packed = [state for state in states if getattr(state, "packing_format_for_cpu", False)]
    for state in packed:
        state.packing_format_for_cpu = False  # type: ignore[union-attr]
    try:
        return model.state_dict()
    finally:
        for state in packed:
            state.packing_format_for_cpu = True  # type: ignore[union-attr]


def decoder_config(model: Any) -> Any:
    """The configuration by which a model's decoder lays out its cache; an encoder-decoder has one for each half."""
    return model.get_decoder().config if model.config.is_encoder_decoder else model.config
