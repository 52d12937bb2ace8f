"""Masks of verification passes, in the form a target's attention takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from heads.target import Target

STABLE_ATTENTION = "headstart_stable"  # the attention that ``infer.stable`` registers with transformers

# attention implementations that take bool masks
BOOL_MASKS = ("sdpa", STABLE_ATTENTION)


def attention_mask(
    target: Target,
    mask: Tensor,
    positions: Tensor | None,
    starts: Sequence[int] | None,
    keys: Tensor | None = None,
) -> Any:
    """What the model is given for a bool (B, 1, q, kv) mask; a dictionary by layer type where the types differ.

    Args:
        positions: (B, q) of the new rows; sliding windows go by them.
        starts: for each text, the column where its new rows begin; kv - q by default.
        keys: (B, kv) positions of all columns, where those in front of the new rows do not count from 0.

    Raises:
        ValueError: layers of a type, or an attention, that takes no such mask.
    """
    kinds = set(target.layer_types)
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        raise ValueError(f"layers of type {', '.join(sorted(unknown))} take no tree mask: this target is not supported")
    masks = {}
    if "full_attention" in kinds:
        masks["full_attention"] = _in_form(target, mask)
    if "sliding_attention" in kinds:
        masks["sliding_attention"] = _in_form(target, mask & _window(target, mask, positions, starts, keys))
    return masks if len(kinds) > 1 else masks[kinds.pop()]


def check_chain(target: Target, mask: Tensor, positions: Tensor | None) -> None:
    """Refuse all but one text in order, for a model whose attention goes by places (``Target.by_place``).

    Raises:
        ValueError: it is a tree, or several texts of different lengths.
    """
    q, kv = mask.shape[-2:]
    plain = torch.ones(q, kv, dtype=torch.bool, device=mask.device).tril(kv - q)
    in_order = positions is None or bool((positions.diff() == 1).all())
    if not in_order or not bool((mask == plain).all()):
        raise ValueError(
            f"{type(target.model).__name__} reads neither trees nor texts of different lengths in one pass, because "
            f"its {target.by_place} go by places in the cache: draft chains, and decode prompts one by one"
        )


def _window(
    target: Target, mask: Tensor, positions: Tensor | None, starts: Sequence[int] | None, places: Tensor | None
) -> Tensor:
    """Bool (B, 1, q, kv): keys within the sliding window, by position (rows of a tree share positions)."""
    texts, _, q, kv = mask.shape
    keys = torch.arange(kv, device=mask.device).repeat(texts, 1) if places is None else places
    own = keys[:, kv - q :] if positions is None else positions.expand(texts, -1)
    for text in range(texts if places is None else 0):
        start = kv - q if starts is None else starts[text]
        keys[text, start : start + q] = own[text]
    return (own[:, :, None] - keys[:, None, :] < (target.sliding_window or kv))[:, None]


def _in_form(target: Target, mask: Tensor) -> Tensor:
    """Bool for kernels that take it, numbers to add for eager attention."""
    if target.config._attn_implementation in BOOL_MASKS:
        return mask
    if target.config._attn_implementation != "eager":
        raise ValueError(
            f"attention {target.config._attn_implementation!r} takes no tree mask: load the target with "
            "attn_implementation='sdpa' or 'eager'"
        )
    additive = torch.zeros(mask.shape, dtype=target.dtype, device=mask.device)
    return additive.masked_fill(~mask, torch.finfo(target.dtype).min)
