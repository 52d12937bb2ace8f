"""Small heads on small targets: built, given random weights, and batches of the target's own states."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import heads
from heads.base import DraftHeads
from heads.judge import Teacher, TrainingBatch
from heads.target import Target
from tests.tiny import tiny_model

VOCAB = 64


@lru_cache(maxsize=8)
def small_target(family: str = "llama", dtype: torch.dtype = torch.float64, layers: int = 4) -> Target:
    """A random frozen target under the name ``tiny/FAMILY``."""
    target = Target(tiny_model(family, dtype=dtype, layers=layers), name=f"tiny/{family}")
    target.model.requires_grad_(False)
    return target


def small_heads(
    kind: str,
    target: Target,
    *,
    lookahead: int = 3,
    taps: tuple[int, ...] | None = None,
    draft_vocab: int | None = None,
    seed: int = 0,
    **options: Any,
) -> DraftHeads:
    """Heads whose every weight is random, so that none is at a special value; in the target's dtype and eval mode."""
    if taps is None and kind == "eagle":
        taps = (1, 2, 3)
    config = heads.make_config(
        kind, target, lookahead=lookahead, taps=taps, draft_vocab_size=draft_vocab, options=options
    )
    built = heads.build(config, target).to(target.dtype)
    random = torch.Generator().manual_seed(seed)
    if draft_vocab is not None:
        built.set_draft_vocabulary(torch.randperm(target.vocab_size, generator=random)[:draft_vocab].sort().values)
    with torch.no_grad():
        for parameter in built.parameters():
            noise = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            if parameter.dim() == 2:
                parameter.copy_(noise * 1.5 / math.sqrt(parameter.shape[1]))
            else:
                parameter.copy_(1 + 0.3 * noise)
    return built.eval()


def random_ids(length: int, *, rows: int = 1, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    """(rows, length) token ids."""
    return torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def read(target: Target, taps: tuple[int, ...], ids: Tensor) -> tuple[Tensor, Tensor]:
    """The target's taps (B, T, taps·H) and post-norm hidden states (B, T, H) over texts without padding."""
    out = target.forward(ids, taps=taps, hidden=True)
    assert out.taps is not None and out.hidden is not None
    return out.taps.clone(), out.hidden.clone()


def batch_of(target: Target, taps: tuple[int, ...], ids: Tensor, loss_mask: Tensor | None = None) -> TrainingBatch:
    """A training batch of whole texts; without ``loss_mask`` every token counts as the target's own."""
    states, hidden = read(target, taps, ids)
    logits = target.project(hidden)
    return TrainingBatch(
        ids=ids,
        loss_mask=torch.ones_like(ids, dtype=torch.bool) if loss_mask is None else loss_mask,
        mask=torch.ones_like(ids, dtype=torch.bool),
        taps=states,
        hidden=hidden,
        top=logits.argmax(-1),
        lse=logits.double().logsumexp(-1),
    )


def soft_ce(draft: Tensor, teacher: Teacher) -> dict[str, Tensor]:
    """Cross-entropy with the teacher's distribution over the draft vocabulary."""
    return {"soft_ce": -(teacher.logits.to(draft.dtype).softmax(-1) * draft.log_softmax(-1)).sum(-1)}


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference as a share of the largest value."""
    assert ours.shape == theirs.shape
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).abs().max() / theirs.abs().max())
