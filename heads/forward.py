"""One pass of a target: its arguments by version and family, its masks, and the states that heads read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from heads import compat, masks

if TYPE_CHECKING:
    from heads.target import Target


@dataclass
class TargetOutput:
    """One pass: logits (B, rows, V), taps (B, q, taps·H) or None, post-norm hidden (B, q, H) or None."""

    logits: Tensor
    taps: Tensor | None
    hidden: Tensor | None


def run(
    target: Target,
    ids: Tensor,
    *,
    cache: Any = None,
    mask: Tensor | None = None,
    positions: Tensor | None = None,
    taps: Sequence[int] = (),
    hidden: bool = False,
    logits_to_keep: int | Tensor = 0,
    starts: Sequence[int] | None = None,
    keys: Tensor | None = None,
) -> TargetOutput:
    """One pass of the model: ``Target.forward`` without gradients, :func:`run` with those that autograd asks for.

    Args:
        ids: (B, q) token ids.
        cache: a transformers cache that holds what came before, or None.
        mask: None, a 2-D padding mask (B, kv), or a 4-D bool mask (B, 1, q, kv) where True may be seen; kv
            counts what the cache holds and the q new rows. Sliding windows are cut out of it here.
        positions: (B, q) position ids; counted on from the cache by default.
        taps: indices of hidden states as transformers counts them: 0 the embedding, i the output of the
            i-th layer, ``num_layers`` the last one after the final norm.
        hidden: also return the post-norm last hidden state.
        logits_to_keep: logits of the last rows only, or of the rows of a 1-D tensor; 0 for all.
        starts: for each text, the column of a 4-D mask where its new rows begin; kv - q by default. Columns
            behind a text's own rows are to be masked.
        keys: (B, kv) positions of all columns of a 4-D mask, for windows; where the cache holds positions from 0 on,
            these need not be told.
    """
    kwargs: dict[str, Any] = {"input_ids": ids, "use_cache": cache is not None}
    if cache is not None:
        kwargs[compat.cache_argument(target.plain)] = cache
    if mask is not None and mask.dim() == 4 and positions is None:
        q, kv = mask.shape[-2:]  # some models would count positions off a 2-D mask
        positions = torch.arange(kv - q, kv, device=ids.device).expand(ids.shape[0], -1)
    if mask is not None and mask.dim() == 4 and target.by_place:
        masks.check_chain(target, mask, positions)
        mask = None  # the model's own is right for one text in order
    if mask is not None:
        tree = mask.dim() == 4
        kwargs["attention_mask"] = masks.attention_mask(target, mask, positions, starts, keys) if tree else mask
    if positions is not None and compat.takes(target.plain, "position_ids"):
        kwargs["position_ids"] = positions
    wanted = [*taps, target.num_layers] if hidden else list(taps)
    if wanted:
        kwargs["output_hidden_states"] = compat.hidden_states_argument(wanted)
    some = isinstance(logits_to_keep, Tensor) or logits_to_keep > 0
    if some and compat.takes(target.plain, "logits_to_keep"):
        kwargs["logits_to_keep"] = logits_to_keep
        some = False
    out = target.call(**kwargs)
    states, logits = out.hidden_states, out.logits
    if some:  # the model gave all rows
        logits = logits[:, logits_to_keep] if isinstance(logits_to_keep, Tensor) else logits[:, -logits_to_keep:]
    return TargetOutput(
        logits=logits,
        taps=torch.cat([states[i] for i in taps], -1) if taps else None,
        hidden=states[target.num_layers] if hidden else None,
    )
