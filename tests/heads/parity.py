"""Both sides of the comparison: a text unrolled as in training, and decoded along as in a generation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from heads.autoregressive import Autoregressive
from heads.base import DraftHeads
from heads.block import Block
from heads.eagle import Eagle
from heads.grow import Budget, Sampler
from heads.judge import TrainingBatch
from heads.target import Target
from tests.heads.small import random_ids, relative, small_heads

LENGTH, LOOKAHEAD = 24, 4
BOUND = {torch.float64: 1e-10, torch.float32: 1e-5}  # relative; passes of other shapes round differently
Key = tuple[int, int]  # row of the text, draft position

CASES: dict[str, dict[str, Any]] = {
    "medusa": {"kind": "medusa"},
    "medusa draft vocabulary": {"kind": "medusa", "draft_vocab": 20, "layers": 2},
    "medusa own output": {"kind": "medusa", "draft_vocab": 20, "own_output": True},
    "eagle": {"kind": "eagle"},
    "eagle draft vocabulary": {"kind": "eagle", "draft_vocab": 20},
    "eagle fc_norm": {"kind": "eagle", "fc_norm": True},
    "eagle norm_output": {"kind": "eagle", "norm_output": True},
    "eagle 3.1": {"kind": "eagle", "fc_norm": True, "norm_output": True, "draft_vocab": 20},
    "eagle without GQA": {"kind": "eagle", "num_key_value_heads": 4},
    "eagle one key head, wide": {"kind": "eagle", "num_key_value_heads": 1, "head_dim": 16, "taps": (1, 4)},
    "eagle in a window": {"kind": "eagle", "window": 6, "norm_output": True},
    "eagle1": {"kind": "eagle1"},
    "eagle1 draft vocabulary": {"kind": "eagle1", "draft_vocab": 20, "bias": False, "num_key_value_heads": 4},
    "eagle1 in a window": {"kind": "eagle1", "window": 2},
    "hydra": {"kind": "hydra"},
    "hydra draft vocabulary": {"kind": "hydra", "draft_vocab": 20, "layers": 3, "embedding_norm": False},
    "hydra own output": {"kind": "hydra", "draft_vocab": 20, "own_output": True, "num_key_value_heads": 1},
    "hydra without a prefix": {"kind": "hydra", "prefix": False},
    "hydra on fused taps": {"kind": "hydra", "taps": (1, 2, 4)},
    "hydra in a window": {"kind": "hydra", "window": 5},
    "block": {"kind": "block"},
    "block, slots of their own place": {"kind": "block", "shifted": False},
    "block draft vocabulary": {"kind": "block", "draft_vocab": 20, "confidence": True},
    "block own output": {"kind": "block", "draft_vocab": 20, "own_output": True, "markov_rank": 0},
    "block in a window": {"kind": "block", "window": 4},
    "block without GQA": {"kind": "block", "num_key_value_heads": 4, "layers": 3},
    "block one key head, wide": {
        "kind": "block",
        "num_key_value_heads": 1,
        "head_dim": 16,
        "taps": (1, 4),
        "layers": 1,
    },
}


def make(case: dict[str, Any], target: Target) -> DraftHeads:
    return small_heads(**{"lookahead": LOOKAHEAD, **case, "target": target})


@dataclass
class Seen:
    """States and logits by row and draft position."""

    states: dict[Key, Tensor] = field(default_factory=dict)
    logits: dict[Key, Tensor] = field(default_factory=dict)

    def worst(self, other: Seen, least: int) -> float:
        """Largest relative difference to ``other``, in states or logits, over at least so many of its keys."""
        assert len(self.logits) >= least and self.logits.keys() <= other.logits.keys()
        assert self.states.keys() == self.logits.keys()
        pairs = [(mine[key], theirs[key]) for mine, theirs in self._tables(other) for key in mine]
        assert all(bool(torch.isfinite(ours).all()) for ours, _ in pairs)
        return max(relative(ours, theirs) for ours, theirs in pairs)

    def _tables(self, other: Seen) -> list[tuple[dict[Key, Tensor], dict[Key, Tensor]]]:
        return [(self.states, other.states), (self.logits, other.logits)]


@contextmanager
def states_of(heads: DraftHeads) -> Iterator[list[Tensor]]:
    """What the output matrix reads while drafting, in the order in which it is read: (n, H) each."""
    found: list[Tensor] = []
    if isinstance(heads, Block):
        with slots_of(heads, found):
            yield found
        return
    if isinstance(heads, Autoregressive):
        with outputs_of(heads, found):
            yield found
        return

    def note(module: Any, inputs: Any, output: Tensor) -> None:
        found.append(output.detach().reshape(-1, output.shape[-1]))

    hooks = [module.register_forward_hook(note) for module in heads.blocks]  # type: ignore[union-attr]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def outputs_of(heads: Autoregressive, found: list[Tensor]) -> Iterator[None]:
    """The layer's outputs, behind a final norm where there is one."""
    original = heads.logits
    norm = heads.norm if isinstance(heads, Eagle) else lambda out: out

    def logits(out: Tensor) -> Tensor:
        found.append(norm(out).detach().reshape(-1, out.shape[-1]))
        return original(out)

    heads.__dict__["logits"] = logits
    try:
        yield
    finally:
        del heads.__dict__["logits"]


@contextmanager
def slots_of(heads: Block, found: list[Tensor]) -> Iterator[None]:
    """What a block's slots give: in training a slot of many blocks (n, H) at a time, in decoding all of one's."""
    original = heads.unary

    def unary(hidden: Tensor) -> Tensor:
        found.extend([hidden.detach()] if hidden.dim() == 2 else hidden.detach().transpose(0, 1))
        return original(hidden)

    heads.__dict__["unary"] = unary
    try:
        yield
    finally:
        del heads.__dict__["unary"]


@torch.no_grad()
def unrolled(heads: DraftHeads, batch: TrainingBatch, text: int = 0) -> Seen:
    """The training unroll of one text of a batch."""
    seen = Seen()
    for j, step in enumerate(heads.unroll(batch)):
        for states, logits, b, row in zip(
            step.states, step.logits, step.batch.tolist(), step.row.tolist(), strict=True
        ):
            if b == text:
                seen.states[row, j], seen.logits[row, j] = states, logits
    return seen


class Forced(Sampler):
    """Drafts given tokens as if it had drawn them, and keeps the logits it was given."""

    def __init__(self, places: Sequence[int]) -> None:
        super().__init__()
        self.places, self.logits = list(places), list[Tensor]()

    def __call__(self, logits: Tensor) -> tuple[int, Tensor]:
        self.logits.append(logits)
        return self.places[len(self.logits) - 1], logits.float().softmax(-1)


def text_for(heads: DraftHeads, length: int = LENGTH, seed: int = 1) -> Tensor:
    """A text that these heads could have drafted."""
    vocab = heads.config.draft_vocab_size or heads.config.vocab_size
    places = random_ids(length, seed=seed, vocab=vocab)
    return places if heads.draft_ids is None else heads.draft_ids[places]


def places_of(heads: DraftHeads, tokens: Sequence[int]) -> list[int]:
    """Draft-vocabulary places of target ids."""
    return list(tokens) if heads.draft_ids is None else [heads.draft_ids.tolist().index(t) for t in tokens]


def decoded(
    heads: DraftHeads, ids: Tensor, taps: Tensor, accepted: Sequence[int], *, prompt: int = 5, between: bool = False
) -> Seen:
    """Decode along a text: each round drafts its next tokens, of which the given number is accepted.

    Args:
        taps: (1, T, taps·H) of the whole text; the decoder is shown what a real one has.
        between: rounds alternate between trees (whose drafts are dropped) and chains.
    """
    seen, last = Seen(), prompt - 1  # the last row with taps
    state = heads.start(taps[:, : last + 1], ids[:, : last + 2])
    for turn, stay in enumerate(accepted):
        room = min(LOOKAHEAD, LENGTH - last - 2)
        with states_of(heads) as states:
            if between and turn % 2:
                heads.propose(state, Budget(rows=9, depth=LOOKAHEAD, width=3))
            else:
                forced = Forced(places_of(heads, ids[0, last + 2 : last + 2 + room].tolist()))
                draft = heads.propose(state, Budget.chain(room), forced)
                assert list(draft.tokens) == ids[0, last + 2 : last + 2 + room].tolist()
                for j, logits in enumerate(forced.logits):
                    seen.states[last, j], seen.logits[last, j] = states[j][-1], logits
        heads.advance(state, taps[:, last + 1 : last + 2 + stay], ids[:, last + 2 : last + 3 + stay])
        last += stay + 1
    return seen
