"""Heads that draft on their own outputs: one decoder layer, run again for each token (EAGLE's kinds).

Row i of a text has a hidden state g_i, made of the target's taps there, and reads the token that follows, x_{i+1}; its
output drafts x_{i+2}, and fed back with that token it drafts x_{i+3}, and so on. In training the same happens at every
row at once, with the text's own tokens ("training-time test", arXiv 2503.01840)::

      step 0   row i: (g_i,  x_{i+1})  attends rows ≤ i                         → logits of x_{i+2}
      step j   row i: (out_{j-1}, x_{i+1+j})  attends step-0 rows ≤ i and the   → logits of x_{i+2+j}
               row's own steps 1…j; rotary position i + j
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from heads.attention import attend_rows
from heads.base import DraftHeads
from heads.eagle_state import EagleGrower, EagleState
from heads.flex import attend_flex
from heads.judge import Output, TrainingBatch, UnrollStep
from heads.layer import DecoderLayer
from heads.rows import drafted_from, packed, positions_of, visible


class Autoregressive(DraftHeads):
    """What a kind adds: how taps become a state, what the layer reads, what its output means."""

    attentions = ("plain", "flex")

    layer: DecoderLayer

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of the weights."""

    @abstractmethod
    def fuse(self, taps: Tensor) -> Tensor:
        """g (…, H) of taps (…, taps·H)."""

    @abstractmethod
    def inputs(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, (B, n, reads), and the residual stream (B, n, H), of a token and a state."""

    @abstractmethod
    def project(self, spoken: Tensor) -> Tensor:
        """Draft logits (…, Vd) of what the output matrix reads."""

    @property
    @abstractmethod
    def outputs(self) -> tuple[nn.Module, ...]:
        """Modules whose trained weights :meth:`project` uses."""

    def spoken(self, out: Tensor) -> Tensor:
        """What the output matrix reads of a step's output."""
        return out

    def logits(self, out: Tensor) -> Tensor:
        """Draft logits (…, Vd) of a step's output."""
        return self.project(self.spoken(out))

    def feed_back(self, out: Tensor) -> Tensor:
        """The next step's hidden state of a step's output."""
        return out

    def terms(self, out: Tensor, batch: TrainingBatch, where: Tensor, at: Tensor) -> dict[str, Tensor]:
        """Loss terms (n,) of the kind's own, already weighted.

        Args:
            out: (n, H) outputs of a step.
            where, at: (n,) the text and the position whose token the logits are judged by the target at.
        """
        return {}

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Rotary factors of positions (B, n)."""
        return self.layer.rotation(positions, dtype)

    # training

    def unroll(self, batch: TrainingBatch) -> Iterator[UnrollStep]:
        """Draft from every row whose next-but-one token is trained.

        The layer reads all n of them end to end, (1, n, ·); only attention needs them by text, packed to the left of
        (B, R), where some places are nobody's.
        """
        trained = drafted_from(batch)
        order, valid = packed(trained, int(trained.sum(1).max()))
        where, place = valid.nonzero(as_tuple=True)
        row, length = order[where, place], batch.ids.shape[1]
        number = (valid.flatten().cumsum(0) - 1).clamp(min=0).view(valid.shape)  # of the row at each place

        def by_text(flat: Tensor) -> Tensor:
            return flat[0][:, number].transpose(0, 1)

        def read(q: Tensor) -> Tensor:
            return attend(by_text(q), k0, v0, seen, own)[where, :, place].transpose(0, 1)[None]

        g = self.fuse(batch.taps)
        after = torch.cat([batch.ids[:, 1:], batch.ids[:, -1:]], 1)
        x_all, residual_all = self.inputs(self.target.embed(after).to(g.dtype), g)
        k0, v0 = self.layer.keys_values(x_all, self.rotation(batch.positions, x_all.dtype))
        seen = visible(batch, order, self.config.options["window"])
        places = positions_of(batch, order)[where, place][None]
        output = Output(lambda spoken, _: self.project(spoken), self.outputs)

        attend = {"plain": attend_rows, "flex": attend_flex}[self.attention]
        x, residual = x_all[where, row][None], residual_all[where, row][None]
        own: list[tuple[Tensor, Tensor]] = []
        hidden = residual
        for j in range(self.config.lookahead):
            rotation = self.rotation(places + j, x.dtype)
            if j:
                token = batch.ids[where, (row + 1 + j).clamp(max=length - 1)][None]
                x, residual = self.inputs(self.target.embed(token).to(hidden.dtype), hidden)
                k, v = self.layer.keys_values(x, rotation)
                own.append((by_text(k), by_text(v)))
            out = self.layer(x, residual, rotation, read)
            hidden = self.feed_back(out)
            terms = self.terms(out[0], batch, where, (row + 1 + j).clamp(max=length - 1))
            yield UnrollStep(self.spoken(out[0]), output, where, row, terms=terms)

    # decoding

    def start(self, taps: Tensor, ids: Tensor, mask: Tensor | None = None) -> EagleState:
        """Row i of the prompt pairs its taps with token i + 1; the root completes the last row."""
        if mask is not None and not bool(mask.all()):
            raise ValueError(
                f"padded prompts are not supported by {self.config.kind} heads yet: decode one prompt at a time"
            )
        return EagleState(self, taps, ids[:, 1:])

    def advance(self, state: EagleState, taps: Tensor, ids: Tensor) -> None:
        """Committed rows replace what was drafted, with the target's own taps."""
        state.commit(taps, ids)

    def grower(self, state: EagleState) -> EagleGrower:
        """Draft on from the committed rows."""
        return EagleGrower(state)
