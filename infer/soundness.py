"""Does a target read several rows as it reads them one by one? If not, no draft can be verified on it: it is refused.

transformers knows hundreds of families, and what they make of a mask, of positions and of a cache is each one's own
code. No list of names says which of them read a block of drafted rows rightly, so each model is asked once: a short
text is read, then a small draft behind it in one pass, and every row must give what the plain model gives at the end
of that row's own text, read whole and without a cache.
"""

from __future__ import annotations

from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from heads.draft import Draft
from heads.target import Target
from infer.cache import ForgettingCache

PREFIX = 5
CHAIN = Draft.chain([7, 2, 9])
TREE = Draft((7, 2, 9, 4), (-1, -1, 0, 1), (None,) * 4)  # two children of the root, each with one of its own

# relative error of a row's logits: rounding lies far below, a row that saw too much or too little far above (some
# families compute a part of a float64 pass in float32)
BOUNDS = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}

_sound: WeakSet[nn.Module] = WeakSet()


def check_rows(target: Target) -> None:
    """Ask a model once; later calls cost nothing.

    Raises:
        ValueError: a row of a draft gives something else than the same text read plainly.
    """
    model = target.model
    if not isinstance(model, PreTrainedModel) or model in _sound or not _room(target):
        return
    drafts = {"a chain": CHAIN} if target.by_place else {"a chain": CHAIN, "a tree": TREE}
    for shape, draft in drafts.items():
        try:
            worst = _worst(target, draft)
        except (IndexError, RuntimeError, TypeError) as wrong:  # whatever a model makes of a mask it does not expect
            raise ValueError(
                f"{type(model).__name__} is not supported as a target: it cannot read rows of {shape} behind a cache "
                f"({type(wrong).__name__}: {wrong})"
            ) from wrong
        if not worst <= BOUNDS.get(target.dtype, 0.1):  # NaN fails too
            raise ValueError(
                f"{type(model).__name__} is not supported as a target: rows of {shape} read in one pass give other "
                f"logits than the same text read plainly (relative difference {worst:.2g}), so drafts cannot be "
                "verified on it"
            )
    _sound.add(model)


def _room(target: Target) -> bool:
    return target.max_positions is None or target.max_positions >= PREFIX + 1 + len(CHAIN)


@torch.inference_mode()
def _worst(target: Target, draft: Draft) -> float:
    """Relative error of rows' logits: the largest, in half precision the median."""
    ids = (3 * torch.arange(PREFIX + 1, device=target.device) + 1)[None] % target.vocab_size  # the last is the root
    nodes = torch.tensor([draft.tokens], device=target.device) % target.vocab_size
    cache, n = ForgettingCache(target), 1 + len(draft)
    target.forward(ids[:, :PREFIX], cache=cache)
    mask = torch.ones(1, 1, n, PREFIX + n, dtype=torch.bool, device=target.device)
    mask[0, 0, :, PREFIX:] = draft.visibility().to(target.device)
    positions = PREFIX + torch.tensor([[0, *draft.depths]], device=target.device)
    out = target.forward(torch.cat([ids[:, PREFIX:], nodes], 1), cache=cache, mask=mask, positions=positions)
    errors = []
    for node in range(-1, len(draft)):
        path = draft.path(node) if node >= 0 else []
        text = torch.cat([ids, nodes[:, path]], 1)
        plain: Tensor = target.call(input_ids=text, use_cache=False).logits[0, -1].double()
        errors.append((out.logits[0, 1 + node].double() - plain).norm() / plain.norm())
    found = torch.stack(errors)
    # in half precision one row may go to another expert by a near-tie; a wrong mask or position is wrong in most rows
    return float(found.max() if target.dtype in (torch.float32, torch.float64) else found.median())
