"""Training's side of heads that draft inside the pass: their rows behind anchors of texts that were read before.

A text is read once, by the target as it is, and its keys and values kept; the rows behind all its anchors then read
those, with gradients, and none of another anchor's rows::

      text      x_0 x_1 x_2 x_3 x_4 …                      no gradients, kept
      rows          │ ▫ ▫ ▫         behind x_1: sees x_0, x_1 and its own
                            │ ▫ ▫ ▫     behind x_3: sees x_0 … x_3 and its own
"""

from __future__ import annotations

import torch
from torch import Tensor

from heads.forward import run
from heads.inside import DraftsInside
from heads.judge import TrainingBatch
from heads.rows import positions_of, visible
from heads.target import Target
from heads.text_cache import TextCache

PASS_ROWS = 2048  # of a pass at most, which bounds its mask; the passes of a batch are the same to rounding


def read_behind(heads: DraftsInside, batch: TrainingBatch, anchors: Tensor, count: int) -> Tensor:
    """Post-norm states (B, R, count, H) of ``count`` rows behind each of ``anchors`` (B, R), which number rows."""
    target, texts = heads.target, len(anchors)
    cache = read_texts(target, batch)
    places = batch.positions.expand(texts, -1)
    slots = torch.arange(count, device=anchors.device)
    own = torch.ones(count, count, dtype=torch.bool, device=anchors.device).tril()
    found = []
    for part in anchors.split(max(1, PASS_ROWS // (texts * count)), 1):
        n = part.shape[1]
        before = visible(batch, part).repeat_interleave(count, 1)
        blocks = torch.block_diag(*[own] * n).bool().expand(texts, -1, -1)
        positions = (positions_of(batch, part)[..., None] + 1 + slots).flatten(1)
        positions = positions.clamp(max=int(places.max()))  # those beyond a text are not judged
        with heads.applied(target, 0, slots.repeat(n).expand(texts, -1)):
            out = run(
                target,
                torch.zeros_like(positions),
                cache=cache,
                mask=torch.cat([before, blocks], -1)[:, None],
                positions=positions,
                keys=torch.cat([places, positions], 1),
                hidden=True,
                logits_to_keep=1,
            )
        assert out.hidden is not None
        found.append(out.hidden.unflatten(1, (n, count)))
    return torch.cat(found, 1)


def read_texts(target: Target, batch: TrainingBatch) -> TextCache:
    """Keys and values of a batch's texts, each read by itself."""
    cache, apart = TextCache(target), None
    if batch.documents is not None:
        rows = torch.arange(batch.ids.shape[1], device=batch.ids.device).expand(batch.ids.shape)
        apart = visible(batch, rows)[:, None]
    positions = None if apart is None else batch.positions
    target.forward(batch.ids, cache=cache, mask=apart, positions=positions, logits_to_keep=1)
    return cache


def apart(ours: Tensor, theirs: Tensor) -> Tensor:
    """Squared distance (n,) of states (n, H) to the target's own, as a share of the latter's square."""
    wide = torch.promote_types(ours.dtype, torch.float32)
    theirs = theirs.to(wide)
    whole = theirs.square().sum(-1)
    return (ours.to(wide) - theirs).square().sum(-1) / torch.where(whole > 0, whole, 1.0)  # 0 in padding
