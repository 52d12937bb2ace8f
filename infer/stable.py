"""The same text whatever the draft, in half precision too: passes whose rows depend on their own prefix alone.

A row of a pass is computed next to others, and kernels round differently with what stands beside it. With
``stable=True`` two things are held still after the prefill:

* every target pass has the same number of rows for each text, filled up with masked ones, so that linear layers run
  the same kernel in the same shape. Within one shape they give a row the same bits at any place (seen in bfloat16 on
  AVX-512 with oneDNN: in fact any number of rows up to 32 gave the same bits, and the output matrix changed at 40);
* attention cannot be held still by shape alone. Its kernels round differently with the number of keys, which grows,
  and a tree leaves holes between a row's ancestors, so that the same keys are summed up in other groups. So scores,
  softmax and weighted sum are computed in float64 here and rounded once, to the dtype of the model: order and holes
  then change a result by parts in 1e16, which reaches the bits of a bfloat16 number about once in 1e13 results.

What this does not cover: passes before the first round (a prompt read in other pieces, as a prefix cache does, rounds
differently), another N, another number of texts in a batch wherever a kernel's bits depend on the number of rows, and
experts, whose matrix products have as many rows as tokens chose them (up to 32 rows that made no difference here).
The text is stable, not ``model.generate``'s: that is made of one-row passes with the model's own attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from heads.masks import STABLE_ATTENTION
from heads.target import Target

ROWS = 8  # of a pass, where the caller names no number

_checked: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()  # model → configurations its layers read
_calls = 0


def fixed_rows(stable: bool | int | None) -> int | None:
    """Rows of every pass that ``stable=`` asks for; None where it asks for nothing.

    Raises:
        ValueError: it is neither a bool nor a number of rows.
    """
    if stable is None or stable is False:
        return None
    if stable is True:
        return ROWS
    if not isinstance(stable, int) or stable < 1:
        raise ValueError(f"stable must be True or the number of rows of every pass, 1 or more, not {stable!r}")
    return stable


@contextmanager
def stable_passes(target: Target) -> Iterator[None]:
    """Passes of ``target`` inside attend in float64; afterwards its attention is what it was, whatever happens.

    Raises:
        ValueError: the model's attention cannot be exchanged (it does not go through transformers' attention
            interface), or is more than this module computes.
    """
    if target.model not in _checked:
        _checked[target.model] = _check(target)
    with _attending(_checked[target.model]):
        yield


@contextmanager
def _attending(configs: list[Any]) -> Iterator[None]:
    before = [config._attn_implementation_internal for config in configs]
    for config in configs:
        config._attn_implementation_internal = STABLE_ATTENTION  # without the setter, which checks for a release
    try:
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name


def _check(target: Target) -> list[Any]:
    """The configurations to switch, once a short pass with them has shown that it is the same model."""
    configs: dict[int, Any] = {}
    for module in target.model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            configs[id(config)] = config
    ids = torch.arange(4, device=target.device)[None] % target.vocab_size
    usual = target.forward(ids).logits.double()
    before = _calls
    try:
        with _attending(list(configs.values())):
            ours = target.forward(ids).logits.double()
        through = _calls - before
    except (KeyError, TypeError, ValueError):
        through = 0
    if through < target.num_layers:
        raise ValueError(
            f"stable is not supported for {type(target.model).__name__}: its attention does not go through "
            f"transformers' AttentionInterface ({through} of {target.num_layers} layers did)"
        )
    if not bool((ours - usual).norm() <= 0.1 * usual.norm()):  # far above rounding, far below another function
        raise ValueError(
            f"stable is not supported for {type(target.model).__name__}: its attention does more than scores, "
            "soft-cap, sinks, position bias, softmax and weighted sum"
        )
    return list(configs.values())


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention in float64, rounded once; what transformers' attention interface calls.

    Args:
        module: the layer that asks.
        query: (B, heads, q, D).
        key, value: (B, kv_heads, kv, D); heads share them in order, as many each.
        attention_mask: bool or additive, (B, 1 or heads, q, kv); None for causal, or for all where ``is_causal`` (the
            module's own by default) says so.
        scaling: of the scores, 1/√D by default.
        softcap: bound of the scores, as in Gemma 2.
        position_bias: (1 or B, heads, q, kv) added to them, as in T5.
        s_aux: (heads,) scores of sinks that take weight and give nothing, as in gpt-oss.

    Returns:
        (B, q, heads, D) in the dtype of ``query``.
    """
    global _calls
    if not torch.compiler.is_compiling():  # a count would be compiled in
        _calls += 1
    batch, heads, q, dim = query.shape
    kv_heads, kv = key.shape[1:3]
    shared = (batch, kv_heads, heads // kv_heads * q, -1)  # rows of all heads that share keys, side by side
    wide = (query.double() * (dim**-0.5 if scaling is None else scaling)).reshape(shared)
    scores = (wide @ key.double().transpose(2, 3)).view(batch, heads, q, kv)
    if softcap is not None:
        scores = (scores / softcap).tanh_().mul_(softcap)
    if position_bias is not None:
        scores += position_bias
    if attention_mask is None and q > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        attention_mask = torch.ones(q, kv, dtype=torch.bool, device=query.device).tril(kv - q)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores.masked_fill_(~attention_mask, torch.finfo(scores.dtype).min)  # not -inf: a filler row may see nothing
    elif attention_mask is not None:
        scores += attention_mask
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.double().view(1, heads, 1, 1).expand(batch, heads, q, 1)], -1)
    weights = scores.softmax(-1)[..., :kv].reshape(shared)
    out = (weights @ value.double()).view(batch, heads, q, -1)
    return out.to(query.dtype).transpose(1, 2).contiguous(), None


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """What transformers makes of a 2-D mask or none: always the bool matrix."""
    return sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


AttentionInterface.register(STABLE_ATTENTION, attention)
AttentionMaskInterface.register(STABLE_ATTENTION, _mask)
