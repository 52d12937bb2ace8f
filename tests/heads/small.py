"""Small heads on small targets: built, given random weights; batches of the target's own states; checks many share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import heads
from heads.base import DraftHeads
from heads.draft import Draft
from heads.judge import Teacher, TrainingBatch
from heads.target import Target
from tests.tiny import tiny_model

VOCAB = 64
TREE = Draft((7, 8, 9, 10, 11, 12, 13), (-1, -1, 0, 0, 1, 2, 4), (None,) * 7)
ON_LAST_STATE = ("medusa", "hydra", "eagle1", "mtp")  # kinds whose default taps every target has
GAIN = {"eagle1": 0.7}  # of random matrices; 1.5 elsewhere, which a layer without norms would blow up step by step
STORED: dict[str, dict[str, Any]] = {
    "medusa": {"kind": "medusa", "layers": 2, "own_output": True},
    "eagle": {"kind": "eagle", "draft_vocab": 20, "fc_norm": True},
    "block": {"kind": "block", "draft_vocab": 20, "own_output": True, "confidence": True},
    "eagle1": {"kind": "eagle1", "draft_vocab": 20},
    "hydra": {"kind": "hydra", "draft_vocab": 20, "layers": 2, "own_output": True, "window": 8},
    "mtp": {"kind": "mtp", "draft_vocab": 20, "lora_r": 2, "lora_modules": ["q_proj", "down_proj"]},
}


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
    if taps is None and kind not in ON_LAST_STATE:
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
                parameter.copy_(noise * GAIN.get(kind, 1.5) / math.sqrt(parameter.shape[1]))
            else:
                parameter.copy_(1 + 0.3 * noise)
    return built.eval()


def memorized(case: dict[str, Any], target: Target, text: Sequence[int], steps: int = 120) -> DraftHeads:
    """Heads as training starts from them, taught one text until they draft it."""
    kind, options = str(case["kind"]), {name: value for name, value in case.items() if name != "kind"}
    taps = None if kind in ON_LAST_STATE else (1, 2, 3)
    config = heads.make_config(kind, target, lookahead=3, taps=taps, options=options)
    torch.manual_seed(0)
    made = heads.build(config, target).to(target.dtype)
    made.initialize()
    batch = batch_of(target, config.taps, torch.tensor([text]))
    optimizer = torch.optim.Adam(made.parameters(), lr=1e-2)
    for _ in range(steps):
        made.loss(batch, soft_ce, measure=False).total.backward()
        optimizer.step()
        optimizer.zero_grad()
    return made.eval()


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


def number(tensor: Tensor) -> float:
    """A scalar's value, with a graph behind it or not."""
    return float(tensor.detach())


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference as a share of the largest value."""
    assert ours.shape == theirs.shape
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs).abs().max() / theirs.abs().max())


def logits_of(heads: DraftHeads) -> Tensor:
    """(K, n, Vd) of every draft position, over a fixed text."""
    batch = batch_of(heads.target, heads.config.taps, random_ids(12))
    with torch.no_grad():
        return torch.stack([step.logits for step in heads.unroll(batch)])


def check_tree(target: Target, prompt: int) -> None:
    """One pass over a tree on a cache gives each path what a plain pass over the whole text gives."""
    ids = random_ids(prompt + 1, seed=3)
    cache = DynamicCache()  # without the configuration: keeps all keys, windows are cut out of the mask
    if prompt:
        target.forward(ids[:, :-1], cache=cache, mask=torch.ones(prompt, prompt).tril().bool()[None, None])
    # eager attention takes its softmax in float32 whatever the model's dtype is
    bound = 1e-6 if target.config._attn_implementation == "eager" else 1e-10
    n = len(TREE) + 1
    mask = torch.cat([torch.ones(n, prompt, dtype=torch.bool), TREE.visibility()], 1)[None, None]
    rows = torch.tensor([[int(ids[0, -1]), *TREE.tokens]])
    positions = torch.tensor([[prompt, *(prompt + depth for depth in TREE.depths)]])
    out = target.forward(rows, cache=cache, mask=mask, positions=positions, taps=(2,), hidden=True)
    assert out.taps is not None and out.hidden is not None
    for node in range(-1, len(TREE)):
        text = torch.cat([ids, torch.tensor([[TREE.tokens[i] for i in TREE.path(node)]], dtype=torch.long)], 1)
        alone = target.forward(text, taps=(2,), hidden=True)
        assert alone.taps is not None and alone.hidden is not None
        assert relative(out.logits[:, node + 1], alone.logits[:, -1]) <= bound
        assert relative(out.taps[:, node + 1], alone.taps[:, -1]) <= bound
        assert relative(out.hidden[:, node + 1], alone.hidden[:, -1]) <= bound
