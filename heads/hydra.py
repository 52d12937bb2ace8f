"""Hydra (arXiv 2402.05109): heads that depend on each other, head k reads the tokens drafted before its own.

Head k drafts from the target's last hidden state and from the embeddings of the root and of the k tokens drafted so
far, side by side. Its first block is W_r z + SiLU(W z + b), later ones x + SiLU(W x + b), and the output matrix is the
target's. Hydra++ puts one decoder layer before them, over the hidden states of the whole text (``prefix``)::

      row i    h_i ──(prefix layer over h_0 … h_i)──► s_i
      head 0   [s_i; e(x_{i+1})]                        → logits of x_{i+2}
      head k   [s_i; e(x_{i+1}); … ; e(x_{i+1+k})]      → logits of x_{i+2+k}      one small step a token

Here W_r starts as [1, 0, …, 0], W and what the prefix layer adds at zero: each head begins as the target's next-token
head, as Medusa's do. The original starts W_r at random and ends its prefix layer with a norm, which would undo that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from heads.attention import attend_rows
from heads.base import DraftHeads
from heads.config import ConfigError, HeadsConfig
from heads.hydra_state import HydraGrower, HydraState
from heads.judge import Output, TrainingBatch, UnrollStep
from heads.layer import LAYER_DEFAULTS, DecoderLayer, layer_shape
from heads.medusa import ResidualBlock
from heads.norm import RMSNorm
from heads.rows import drafted_from, packed, positions_of, take, visible
from heads.target import Target

DEFAULTS: dict[str, Any] = LAYER_DEFAULTS | {
    "layers": 1,  # blocks a head; the paper's best heads have 4
    "prefix": True,  # a decoder layer over the text's hidden states before the heads (Hydra++)
    "embedding_norm": True,  # embeddings under a norm: they are much smaller than hidden states
    "own_output": False,  # one output matrix for all heads, from the target's rows, instead of the target's
    "dropout": 0.0,  # of what blocks read in training; the paper has 0.2
    "position_decay": 0.8,  # weight of draft position j is this to the power j
}


class FirstBlock(nn.Module):
    """W_r z + SiLU(W z + b), from ``parts`` vectors side by side to one."""

    def __init__(self, width: int, parts: int) -> None:
        super().__init__()
        self.linear = nn.Linear(parts * width, width)
        self.residual = nn.Linear(parts * width, width, bias=False)
        for parameter in (self.linear.weight, self.linear.bias, self.residual.weight):
            nn.init.zeros_(parameter)
        with torch.no_grad():
            self.residual.weight[:, :width].fill_diagonal_(1.0)

    def forward(self, z: Tensor) -> Tensor:
        """(…, parts·H) → (…, H)."""
        return self.residual(z) + nn.functional.silu(self.linear(z))


class PrefixLayer(DecoderLayer):
    """A decoder layer over hidden states; it starts as the identity."""

    input_layernorm: RMSNorm

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config, config.hidden_size, ("input_layernorm",))
        nn.init.zeros_(self.o_proj.weight)
        nn.init.zeros_(self.down_proj.weight)


class Hydra(DraftHeads):
    """The heads; taps hold the state that the target's output matrix reads, or several that are fused into one.

    Raises:
        ConfigError: an option is out of its range.
    """

    def __init__(self, config: HeadsConfig, target: Target) -> None:
        super().__init__(config, target)
        o, width = config.options, config.hidden_size
        if o["layers"] < 1 or not 0 <= o["dropout"] < 1:
            raise ConfigError("hydra options: layers must be 1 or more, and dropout 0 to below 1")
        self.fc = nn.Linear(len(config.taps) * width, width, bias=False) if len(config.taps) > 1 else None
        self.layer = PrefixLayer(config) if o["prefix"] else None
        self.embedding_norm = RMSNorm(width, eps=o["rms_norm_eps"]) if o["embedding_norm"] else None
        # one module a block: a repeated one would tie the layers' weights
        self.blocks = nn.ModuleList(
            nn.Sequential(
                FirstBlock(width, head + 2),
                *(nn.Sequential(nn.Dropout(o["dropout"]), ResidualBlock(width)) for _ in range(o["layers"] - 1)),
            )
            for head in range(config.lookahead)
        )
        self.dropout = nn.Dropout(o["dropout"])
        rows = config.draft_vocab_size or config.vocab_size
        self.lm_head = nn.Linear(width, rows, bias=False) if o["own_output"] else None

    @classmethod
    def default_options(cls, target: Target) -> dict[str, Any]:
        """The prefix layer takes the shape of the target's own."""
        return DEFAULTS | layer_shape(target)

    def initialize(self) -> None:
        """Fused taps start as the last of them; an output matrix of one's own as the target's rows."""
        if self.fc is not None:
            nn.init.zeros_(self.fc.weight)
            with torch.no_grad():
                self.fc.weight[:, -self.config.hidden_size :].fill_diagonal_(1.0)
        if self.lm_head is not None:
            weight = self.target.output.weight.detach()
            self.lm_head.weight.data.copy_(weight if self.draft_ids is None else weight[self.draft_ids])

    # what training and decoding share

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(self.blocks.parameters()).dtype

    def fuse(self, taps: Tensor) -> Tensor:
        """h (…, H) of taps (…, taps·H)."""
        taps = taps.to(self.dtype)
        return taps if self.fc is None else self.fc(taps)

    def embed(self, ids: Tensor) -> Tensor:
        """What the heads read of tokens (…), (…, H)."""
        embedded = self.target.embed(ids).to(self.dtype)
        return embedded if self.embedding_norm is None else self.embedding_norm(embedded)

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Rotary factors of positions (B, n) in the prefix layer."""
        assert self.layer is not None
        return self.layer.rotation(positions, dtype)

    def head(self, k: int, state: Tensor, embedded: Tensor) -> Tensor:
        """Logits (…, Vd) of head k.

        Args:
            state: s (…, H).
            embedded: (…, (k+1)·H) embeddings of the root and of the k tokens behind it, in order.
        """
        return self.project(self.residual(k, state, embedded))

    def residual(self, k: int, state: Tensor, embedded: Tensor) -> Tensor:
        """What the output matrix reads of head k, (…, H)."""
        out = self.blocks[k](self.dropout(torch.cat([state, embedded], -1)))
        return out if self.lm_head is None else self.dropout(out)

    def project(self, out: Tensor) -> Tensor:
        """Logits (…, Vd) of what the blocks give."""
        if self.lm_head is not None:
            return self.target.transform(self.lm_head(out))
        return self.target.project_rows(out.to(self.target.dtype), self.draft_ids)  # heads may train in a wider dtype

    # training

    def unroll(self, batch: TrainingBatch) -> Iterator[UnrollStep]:
        """Every head at every row whose next-but-one token is trained, behind the text's own tokens."""
        trained = drafted_from(batch)
        where, row = trained.nonzero(as_tuple=True)
        state = self.fuse(batch.taps[where, row]) if self.layer is None else self._prefixed(batch, trained)
        output = Output(lambda out, _: self.project(out), () if self.lm_head is None else (self.lm_head,))
        last = batch.ids.shape[1] - 1
        embedded = self.embed(batch.ids[where, row + 1])
        for k in range(self.config.lookahead):
            if k:
                more = self.embed(batch.ids[where, (row + 1 + k).clamp(max=last)])
                embedded = torch.cat([embedded, more], -1)
            yield UnrollStep(self.residual(k, state, embedded), output, where, row)

    def _prefixed(self, batch: TrainingBatch, trained: Tensor) -> Tensor:
        """s (n, H) of the ``trained`` (B, T) rows, in order."""
        layer = self.layer
        assert layer is not None
        order, valid = packed(trained, int(trained.sum(1).max()))
        h = self.fuse(batch.taps)
        x = layer.input_layernorm(h)
        k, v = layer.keys_values(x, self.rotation(batch.positions, x.dtype))
        seen = visible(batch, order, self.config.options["window"])
        rotation = self.rotation(positions_of(batch, order), x.dtype)
        out = layer(take(x, order), take(h, order), rotation, lambda q: attend_rows(q, k, v, seen))
        return out[valid]

    # decoding

    def start(self, taps: Tensor, ids: Tensor, mask: Tensor | None = None) -> HydraState:
        """The prompt's states, and the root that the first head reads."""
        if mask is not None and not bool(mask.all()):
            raise ValueError("padded prompts are not supported by hydra heads: decode one prompt at a time")
        return HydraState(self, taps, ids[:, -1:])

    def advance(self, state: HydraState, taps: Tensor, ids: Tensor) -> None:
        """Committed rows and a new root."""
        state.commit(taps, ids[:, -1:])

    def grower(self, state: HydraState) -> HydraGrower:
        """One head a depth, each node behind its own tokens."""
        return HydraGrower(state)
