"""Heads to be exported and imported: every option that a format must carry, and how one draft of them looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heads.base import DraftHeads
from heads.target import Target
from tests.heads.small import small_heads, small_target


@dataclass(frozen=True)
class Case:
    """Heads, the format and engine they go to, and how deep the target is."""

    heads: dict[str, Any]
    to: str
    engine: str | None = None
    layers: int = 8

    def make(self) -> DraftHeads:
        """The heads on their target."""
        return small_heads(target=self.target(), **self.heads)

    def target(self) -> Target:
        """A tiny Llama."""
        return small_target(layers=self.layers)


USUAL: dict[str, Any] = {"kind": "eagle", "taps": (2, 4, 5)}
OTHER: dict[str, Any] = {"kind": "eagle", "taps": (1, 3, 7)}
FULL: dict[str, Any] = {
    "fc_norm": True,
    "norm_output": True,
    "draft_vocab": 20,
    "rope_theta": 777.0,
    "rms_norm_eps": 1e-3,
}
MEDUSA: dict[str, Any] = {"kind": "medusa"}
BLOCK: dict[str, Any] = {"kind": "block", "lookahead": 4, "shifted": False, "markov_rank": 0}
DSPARK: dict[str, Any] = {"kind": "block", "lookahead": 4, "own_output": True, "confidence": True}

CASES: dict[str, Case] = {
    "eagle3": Case(USUAL, "eagle3"),
    "eagle3 reduced": Case(USUAL | {"draft_vocab": 20}, "eagle3"),
    "eagle3 3.1": Case(USUAL | FULL, "eagle3"),
    "eagle3 shape": Case(USUAL | {"num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 24}, "eagle3"),
    "eagle3 vllm": Case(OTHER | FULL, "eagle3", "vllm"),
    "eagle3 sglang": Case(OTHER | {"draft_vocab": 20}, "eagle3", "sglang"),
    "eagle3 two taps": Case({"kind": "eagle", "taps": (1, 4)}, "eagle3", "vllm"),
    "eagle3 shallow": Case({"kind": "eagle", "taps": (1, 2, 3)}, "eagle3", "vllm", layers=4),
    "eagle1": Case({"kind": "eagle1", "rope_theta": 777.0, "rms_norm_eps": 1e-3}, "eagle1"),
    "eagle1 vllm": Case({"kind": "eagle1", "bias": False, "num_key_value_heads": 1, "head_dim": 16}, "eagle1", "vllm"),
    "eagle1 sglang": Case({"kind": "eagle1", "intermediate_size": 24}, "eagle1", "sglang"),
    "speculators": Case(USUAL, "speculators"),
    "speculators 3.1": Case(OTHER | FULL, "speculators"),
    "dflash": Case(BLOCK | {"taps": (2, 4, 5), "mask_token_id": 9, "rope_theta": 777.0}, "dflash"),
    "dflash shape": Case(BLOCK | {"taps": (1, 7), "layers": 3, "num_key_value_heads": 1, "head_dim": 16}, "dflash"),
    "dspark": Case({"kind": "block", "lookahead": 4, "markov_rank": 4, "taps": (1, 7)}, "dspark"),
    "dspark full": Case(DSPARK | {"taps": (2, 4, 5), "markov_rank": 6, "draft_vocab": 20}, "dspark"),
    "medusa": Case(MEDUSA | {"layers": 2}, "medusa"),
    "medusa own": Case(MEDUSA | {"own_output": True}, "medusa"),
    "medusa vllm": Case(MEDUSA, "medusa", "vllm"),
    "medusa vllm own": Case(MEDUSA | {"layers": 2, "own_output": True, "draft_vocab": 20}, "medusa", "vllm"),
    "medusa vllm reduced": Case(MEDUSA | {"draft_vocab": 20}, "medusa", "vllm"),
}


def drafted(heads: DraftHeads, text: Tensor, root: int, tokens: Sequence[int]) -> list[Tensor]:
    """What the heads say along a draft of such tokens: logits (V,) behind the root and behind each of them."""
    out = heads.target.forward(text[None], taps=heads.config.taps)
    assert out.taps is not None
    with torch.no_grad():
        grower = heads.grower(heads.start(out.taps, torch.cat([text, torch.tensor([root])])[None]))
        found = [grower.first()]
        for node in range(len(tokens)):
            parents = list(range(-1, node))
            found.append(grower.after([node], tokens[: node + 1], parents)[0])
    if heads.draft_ids is None:
        return found
    full = [logits.new_full((heads.config.vocab_size,), float("-inf")) for logits in found]
    for row, logits in zip(full, found, strict=True):
        row[heads.draft_ids] = logits
    return full
