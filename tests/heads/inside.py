"""Both sides of heads that draft inside the pass: masks behind rows of a known text, and those of a real decode of it.

The decode runs the whole loop over the target's own greedy text. Its drafts are made of that text's tokens and wrong
ones, so that acceptance ends where it is wanted; what the heads would have drafted is noted in every round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heads.draft import Draft
from heads.grow import Budget, Sampler
from heads.mtp import Mtp
from heads.target import Target
from infer.decode import Decoding
from infer.drafters.heads import HeadsDrafter
from infer.drafters.inside import HeadsInside
from infer.rounds import Rounds
from infer.stopping import Stop
from tests.heads.parity import Seen
from tests.heads.small import batch_of, random_ids, small_heads

LOOKAHEAD, PROMPT, NEW = 3, 5, 22


def small_mtp(target: Target, *, lookahead: int = LOOKAHEAD, **options: Any) -> Mtp:
    """Heads with random weights everywhere, rank 3."""
    made = small_heads("mtp", target, lookahead=lookahead, **{"lora_r": 3, "lora_alpha": 3, **options})
    assert isinstance(made, Mtp)
    return made


def greedy_text(target: Target, prompt: int = PROMPT, new: int = NEW, seed: int = 0) -> Tensor:
    """(1, n) a random prompt and the target's own text behind it."""
    ids = random_ids(prompt, seed=seed)
    return target.model.generate(ids, max_new_tokens=new, do_sample=False)


@torch.no_grad()
def unrolled(heads: Mtp, text: Tensor) -> Seen:
    """Masks behind every row of the text, and what they draft behind its own tokens."""
    seen = Seen()
    batch = batch_of(heads.target, heads.config.taps, text)
    rows = torch.arange(text.shape[1] - 2)[None]
    states = heads.read_masks(batch, rows)[0]
    for j, step in enumerate(heads.unroll(batch)):
        for n, row in enumerate(step.row.tolist()):
            seen.states[row, j] = states[row, j]
            seen.logits[row, j] = step.logits[n]
    return seen


class Roomy(HeadsInside):
    """Leaves room for all masks behind all of a forced draft."""

    def reserve(self, budget: Budget) -> Budget:
        return Budget(rows=1 + 2 * LOOKAHEAD, depth=LOOKAHEAD, width=3)


class Forced(HeadsDrafter):
    """Notes what the heads would draft behind the text's own tokens, and drafts what it is told to.

    Args:
        text: (n,) of the whole decode.
        plan: for each round in turn how many of the text's tokens are drafted before wrong ones.
        tree: drafts a tree in which the right path comes last, else a chain.
    """

    def __init__(self, heads: Mtp, text: Tensor, plan: Sequence[int], tree: bool) -> None:
        super().__init__(heads)
        self.text, self.plan, self.tree = text.tolist(), list(plan), tree
        self.known, self.found, self.round = 0, Seen(), 0

    @property
    def inside(self) -> Roomy:
        assert isinstance(self.heads, Mtp)
        return Roomy(self.heads, lambda: self._state)

    def begin(self, target: Target, ids: Tensor, taps: Tensor | None) -> None:
        self.known = ids.shape[1]
        super().begin(target, ids, taps)

    def commit(self, taps: Tensor | None, ids: list[int]) -> None:
        self.known += len(ids)
        super().commit(taps, ids)

    def propose(self, budget: Budget, sampler: Sampler | None) -> Draft:
        self._advance()
        self._note()
        right = self.plan[self.round % len(self.plan)]
        self.round += 1
        tokens = self.text[self.known :][:LOOKAHEAD]
        wrong = [(token + 1) % 64 for token in tokens]
        path = [*tokens[:right], *wrong[right:]]
        if not self.tree:
            return Draft.chain(path)
        # at each depth a wrong node before the right one; the wrong ones of the first two depths have children, too
        nodes: list[tuple[int, int]] = []
        parent, astray = -1, -1
        for depth, token in enumerate(path):
            nodes += [((token + 2) % 64, astray if depth == 1 else parent), (token, parent)]
            parent, astray = len(nodes) - 1, len(nodes) - 2
        names, parents = zip(*nodes, strict=True)
        return Draft(names, parents, (None,) * len(nodes))

    def _note(self) -> None:
        row, tokens = self.known - 2, self.text[self.known :]
        grower = self.heads.grower(self._state)
        for j, state in enumerate(self._state.states[: len(tokens)]):
            chain = list(range(-1, j - 1))
            logits = grower.first() if j == 0 else grower.after([j - 1], tokens[:j], chain)[0]
            self.found.states[row, j], self.found.logits[row, j] = state.clone(), logits.clone()


def decoded(
    heads: Mtp, text: Tensor, plan: Sequence[int], *, tree: bool = False, rows: int = 40, cache: Any = None
) -> Seen:
    """What the heads would draft in each round of a decode of the text, with these drafts."""
    drafter = Forced(heads, text[0], plan, tree)
    decoding = Decoding(
        target=heads.target,
        ids=text[:, :PROMPT],
        drafter=drafter,
        budget=Budget(rows=rows, depth=LOOKAHEAD, width=3),
        stop=Stop(text.shape[1]),
        cache=cache,
    )
    emitted = [token for each in Rounds([decoding], cache=cache).run() for token in each[0]]
    assert emitted == text[0, PROMPT:].tolist()
    return drafter.found
