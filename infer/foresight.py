"""Logits processors that may look at drafted nodes which are then rejected.

Rules that look ahead (:mod:`infer.rule`) ask for p at nodes off the accepted path. A processor that is a function of
prefix and scores does not mind. One that keeps a state is copied before it looks, and the copy thrown away. What
cannot be copied for certain may not look ahead at all: a copy of a function shares what the function closes over, a
copy of a module would be a second model. So only objects made of plain data are copied, and everything else counts
as having a state somewhere.
"""

from __future__ import annotations

import copy
import enum
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor
from transformers.generation import logits_process as known

from infer.nucleus import Nucleus

# processors whose output depends on the scores alone
PREFIX_FREE: frozenset[type] = frozenset({Nucleus}) | frozenset(
    getattr(known, name)
    for name in (
        "TemperatureLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "SuppressTokensLogitsProcessor",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
    )
    if hasattr(known, name)
)

# and those whose output depends on prefix and scores alone
STATELESS: frozenset[type] = PREFIX_FREE | frozenset(
    getattr(known, name)
    for name in (
        "EncoderNoRepeatNGramLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "ExponentialDecayLengthPenalty",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "SuppressTokensAtBeginLogitsProcessor",
    )
    if hasattr(known, name)
)

IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)
SHARED = (type, types.ModuleType, types.BuiltinFunctionType)  # may be named by code, not held as data


def copyable(processor: Any) -> bool:
    """Whether a copy of the processor is sure to share no state with it."""
    if type(processor) in STATELESS:
        return True
    if not isinstance(processor, LogitsProcessor) or not _plain(processor, set()):
        return False
    try:
        copy.deepcopy(processor)
    except Exception:
        return False
    return True


def copied(processors: Iterable[Any]) -> list[Any]:
    """The processors, those with a state as copies."""
    return [p if type(p) in STATELESS else copy.deepcopy(p) for p in processors]


def _plain(value: Any, seen: set[int]) -> bool:
    """Whether a value is data through and through, code that keeps nothing outside its object included."""
    if isinstance(value, IMMUTABLE) or type(value) is Tensor or id(value) in seen:
        return True
    seen.add(id(value))
    if isinstance(value, list | tuple | set | frozenset | deque):
        return all(_plain(item, seen) for item in value)
    if isinstance(value, dict):
        return all(_plain(item, seen) for pair in value.items() for item in pair)
    if isinstance(value, (nn.Module, types.FunctionType, types.MethodType, *SHARED)) or not hasattr(value, "__dict__"):
        return False
    return _plain(vars(value), seen) and all(map(_self_contained, _methods(type(value))))


def _methods(kind: type) -> Iterator[types.FunctionType]:
    for base in kind.__mro__:
        if base is not object and not base.__module__.startswith("transformers."):
            yield from (member for member in vars(base).values() if isinstance(member, types.FunctionType))


def _self_contained(method: types.FunctionType) -> bool:
    """Whether a method names nothing outside its object that could change: no lists of its module, no closure."""
    cells = [cell.cell_contents for cell in method.__closure__ or ()]
    names = [method.__globals__[name] for name in method.__code__.co_names if name in method.__globals__]
    return all(isinstance(value, (*IMMUTABLE, *SHARED)) for value in cells) and all(
        isinstance(value, (*IMMUTABLE, *SHARED, types.FunctionType)) for value in names
    )
