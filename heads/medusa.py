"""Medusa (arXiv 2401.10774): K independent heads on the last hidden state, head k drafts the k-th next token.

A head is a stack of residual blocks x + SiLU(Wx + b) under an output matrix, the target's own (shared, nothing
to store) or one of its own. W starts at zero, so that every head begins as the target's next-token head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from heads.base import DraftHeads
from heads.best_first import Ranking, depth_of, ranking
from heads.config import HeadsConfig
from heads.judge import Output, TrainingBatch, UnrollStep
from heads.rows import drafted_from
from heads.target import Target

DEFAULTS: dict[str, Any] = {
    "layers": 1,  # residual blocks a head
    "own_output": False,  # an output matrix a head, from the target's rows, instead of the target's
    "position_decay": 0.8,  # weight of draft position j is this to the power j
}


class ResidualBlock(nn.Module):
    """x + SiLU(Wx + b)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(…, H) → (…, H)."""
        return x + nn.functional.silu(self.linear(x))


@dataclass
class MedusaState:
    """The last committed position's hidden state, (1, 1, H)."""

    hidden: Tensor


class Medusa(DraftHeads):
    """The heads; taps hold the one state that the target's output matrix reads."""

    def __init__(self, config: HeadsConfig, target: Target) -> None:
        super().__init__(config, target)
        width, layers = config.hidden_size, config.options["layers"]
        # one module a block: a repeated one would tie the layers' weights
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(width) for _ in range(layers))) for _ in range(config.lookahead)
        )
        rows = config.draft_vocab_size or config.vocab_size
        self.outputs = nn.ModuleList(
            nn.Linear(width, rows, bias=False) for _ in range(config.lookahead if config.options["own_output"] else 0)
        )

    def passes(self, depth: int) -> int:
        """All heads read one state."""
        return 1

    @classmethod
    def default_options(cls, target: Target) -> dict[str, Any]:
        """Nothing depends on the target."""
        return dict(DEFAULTS)

    def initialize(self) -> None:
        """Blocks start at zero; own output matrices as copies of the target's rows."""
        weight = self.target.output.weight.detach()
        for output in self.outputs.parameters():
            output.data.copy_(weight if self.draft_ids is None else weight[self.draft_ids])

    def head(self, k: int, hidden: Tensor) -> Tensor:
        """Logits (…, Vd) of head k for post-norm hidden states (…, H)."""
        return self.project(k, self.residual(k, hidden))

    def residual(self, k: int, hidden: Tensor) -> Tensor:
        """What head k's output matrix reads, (…, H), of post-norm hidden states (…, H)."""
        return self.blocks[k](hidden.to(next(self.parameters()).dtype))

    def project(self, k: int, x: Tensor) -> Tensor:
        """Logits (…, Vd) of head k's output matrix."""
        if len(self.outputs):
            return self.target.transform(self.outputs[k](x))
        return self.target.project_rows(x.to(self.target.dtype), self.draft_ids)  # heads may train in a wider dtype

    def unroll(self, batch: TrainingBatch) -> Iterator[UnrollStep]:
        """Every head at every position whose next-but-one token is trained."""
        where, row = drafted_from(batch).nonzero(as_tuple=True)
        hidden = batch.taps[where, row]
        for k in range(self.config.lookahead):
            output = Output(lambda x, _, k=k: self.project(k, x), tuple(self.outputs[k : k + 1]))  # type: ignore[misc]
            yield UnrollStep(self.residual(k, hidden), output, where, row)

    def start(self, taps: Tensor, ids: Tensor, mask: Tensor | None = None) -> MedusaState:
        """Only the last position matters."""
        return MedusaState(taps[:, -1:])

    def advance(self, state: MedusaState, taps: Tensor, ids: Tensor) -> None:
        """The last committed position is the new one."""
        state.hidden = taps[:, -1:]

    def grower(self, state: MedusaState) -> MedusaGrower:
        """Heads are independent of the tokens drafted."""
        return MedusaGrower(self, state.hidden[0, 0])


class MedusaGrower:
    """All nodes of a depth share the head of that depth."""

    def __init__(self, heads: Medusa, hidden: Tensor) -> None:
        self.heads, self.hidden = heads, hidden
        self._rankings: dict[int, Ranking] = {}

    def first(self) -> Tensor:
        """Logits (Vd,) of head 0."""
        return self.heads.head(0, self.hidden)

    def after(self, nodes: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
        """Logits (len(nodes), Vd) of the head that is as deep as the nodes' children."""
        return self._head(depth_of(nodes[0], parents)).expand(len(nodes), -1)

    def ranked(self, node: int, tokens: Sequence[int], parents: Sequence[int], width: int) -> Ranking:
        """See :class:`heads.best_first.Ranked`: each head is asked once a draft."""
        depth = depth_of(node, parents)
        if depth not in self._rankings:
            self._rankings[depth] = ranking(self._head(depth).float().log_softmax(-1), width)
        return self._rankings[depth]

    def _head(self, depth: int) -> Tensor:
        if depth >= self.heads.config.lookahead:
            raise ValueError(
                f"a draft of depth {depth + 1} > {self.heads.config.lookahead} heads: ask for a shallower budget"
            )
        return self.heads.head(depth, self.hidden)
