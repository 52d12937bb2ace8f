"""EAGLE-3 (arXiv 2503.01840): one decoder layer on fused taps that drafts on its own outputs.

Row i of a text fuses the target's taps at i, g_i = fc(taps_i), and reads the token that follows, x_{i+1}; its
output drafts x_{i+2}, and fed back with that token it drafts x_{i+3}, and so on. In training the same happens at
every row at once, with the text's own tokens ("training-time test")::

      step 0   row i: (g_i,  x_{i+1})  attends rows ≤ i                         → logits of x_{i+2}
      step j   row i: (out_{j-1}, x_{i+1+j})  attends step-0 rows ≤ i and the   → logits of x_{i+2+j}
               row's own steps 1…j; rotary position i + j

The layer's weights and names follow the format that serving engines load (``heads/formats``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heads.base import DraftHeads
from heads.config import HeadsConfig
from heads.eagle_state import EagleGrower, EagleState
from heads.judge import Output, TrainingBatch, UnrollStep
from heads.norm import RMSNorm
from heads.rotary import apply_rotary, rotary
from heads.target import Target

DEFAULTS: dict[str, Any] = {
    "rope_theta": 10000.0,  # what the engines assume when a config does not say
    "rms_norm_eps": 1e-5,
    "position_decay": 0.8,  # weight of draft position j is this to the power j
    "fc_norm": False,  # EAGLE-3.1: a norm on each tap before they are fused
    "norm_output": False,  # EAGLE-3.1: feed the normed output to the next step
    "train_output": True,  # train the output matrix; it starts as the target's rows
}

Attend = Callable[[Tensor], Tensor]


class EagleLayer(nn.Module):
    """The decoder layer; attention reads cat(norm(embedding), norm(hidden)), 2H wide, and the residual is hidden."""

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        o, width = config.options, config.hidden_size
        self.heads, self.kv_heads, self.head_dim = o["num_attention_heads"], o["num_key_value_heads"], o["head_dim"]
        eps, inner = o["rms_norm_eps"], o["intermediate_size"]
        self.input_layernorm = RMSNorm(width, eps=eps)
        self.hidden_norm = RMSNorm(width, eps=eps)
        self.post_attention_layernorm = RMSNorm(width, eps=eps)
        self.q_proj = nn.Linear(2 * width, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * width, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * width, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, width, bias=False)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def inputs(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """What attention reads, (B, n, 2H)."""
        return torch.cat([self.input_layernorm(embedding), self.hidden_norm(hidden)], -1)

    def keys_values(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values (B, kv_heads, n, head_dim) of inputs (B, n, 2H)."""
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2)
        return apply_rotary(k, rotation), v

    def forward(self, x: Tensor, hidden: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Output (B, n, H), before the final norm; ``attend`` maps queries (B, heads, n, head_dim) to their reading."""
        q = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
        read = attend(apply_rotary(q, rotation)).transpose(1, 2).flatten(2)
        hidden = hidden + self.o_proj(read)
        y = self.post_attention_layernorm(hidden)
        return hidden + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Eagle(DraftHeads):
    """EAGLE-3 heads, with EAGLE-3.1's norms as options."""

    def __init__(self, config: HeadsConfig, target: Target) -> None:
        super().__init__(config, target)
        width, taps = config.hidden_size, len(config.taps)
        o = config.options
        self.fc = nn.Linear(taps * width, width, bias=False)
        self.fc_norms = nn.ModuleList(RMSNorm(width, eps=o["rms_norm_eps"]) for _ in range(taps if o["fc_norm"] else 0))
        self.layer = EagleLayer(config)
        self.norm = RMSNorm(width, eps=o["rms_norm_eps"])
        self.lm_head = nn.Linear(width, config.draft_vocab_size or config.vocab_size, bias=False)
        self.lm_head.weight.requires_grad_(bool(o["train_output"]))

    @classmethod
    def default_taps(cls, target: Target) -> tuple[int, ...]:
        """Low, middle and high: the inputs of layers 2, n/2 and n - 3, as the serving engines choose them.

        Raises:
            ValueError: the target has too few layers for three different taps there.
        """
        n = target.num_layers
        taps = (2, n // 2, n - 3)
        if not 0 < taps[0] < taps[1] < taps[2]:
            raise ValueError(
                f"a target of {n} layers has no three distinct taps at {taps}: name taps between 0 and {n} yourself"
            )
        return taps

    @classmethod
    def default_options(cls, target: Target) -> dict[str, Any]:
        """The layer takes the shape of the target's own."""
        c, heads = target.config, target.config.num_attention_heads
        return DEFAULTS | {
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(c, "num_key_value_heads", None) or heads,
            "head_dim": getattr(c, "head_dim", None) or target.hidden_size // heads,
            "intermediate_size": getattr(c, "intermediate_size", None) or 4 * target.hidden_size,
        }

    def initialize(self) -> None:
        """The output matrix starts as the target's rows, under a norm that keeps the first logits near uniform.

        A fresh layer's output has nothing to do with the target's last state: at the target's own scale its logits
        would be confidently wrong, and the first hundred steps would go into taking that back.
        """
        weight = self.target.output.weight.detach()
        rows = (weight if self.draft_ids is None else weight[self.draft_ids]).float()
        self.lm_head.weight.data.copy_(rows)
        self.norm.weight.data.fill_(1.0 / float(rows.norm(dim=1).mean()))

    # what training and decoding share

    def fuse(self, taps: Tensor) -> Tensor:
        """g (…, H) of taps (…, taps·H)."""
        taps = taps.to(self.fc.weight.dtype)
        if len(self.fc_norms):
            parts = taps.chunk(len(self.fc_norms), -1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norms, parts, strict=True)], -1)
        return self.fc(taps)

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Rotary factors of positions (B, n)."""
        return rotary(positions, self.layer.head_dim, float(self.config.options["rope_theta"]), dtype)

    def logits(self, out: Tensor) -> Tensor:
        """Draft logits (…, Vd) of a step's output."""
        return self.project(self.norm(out))

    def project(self, normed: Tensor) -> Tensor:
        """Draft logits (…, Vd) of a normed output."""
        return self.target.transform(self.lm_head(normed))

    def feed_back(self, out: Tensor) -> Tensor:
        """The next step's hidden state of a step's output."""
        return self.norm(out) if self.config.options["norm_output"] else out

    # training

    def unroll(self, batch: TrainingBatch) -> Iterator[UnrollStep]:
        """Draft from every row whose next-but-one token is trained; rows are packed to the left of (B, R)."""
        trained = torch.zeros_like(batch.loss_mask)
        trained[:, :-2] = batch.loss_mask[:, 2:]
        width = int(trained.sum(1).max())
        order = (~trained).int().sort(dim=1, stable=True).indices[:, :width]
        valid = trained.gather(1, order)
        where, place = valid.nonzero(as_tuple=True)
        length = batch.ids.shape[1]

        g = self.fuse(batch.taps)
        positions = batch.positions.expand(len(batch.ids), -1)
        after = torch.cat([batch.ids[:, 1:], batch.ids[:, -1:]], 1)
        x_all = self.layer.inputs(self.target.embed(after).to(g.dtype), g)
        k0, v0 = self.layer.keys_values(x_all, self.rotation(positions, x_all.dtype))
        columns = torch.arange(length, device=g.device)
        causal = (columns <= order[:, :, None]) & batch.same_text(order)  # (B, R, T): rows up to the own one
        place_in_text = positions.gather(1, order)

        hidden, x = _rows(g, order), _rows(x_all, order)
        own: list[tuple[Tensor, Tensor]] = []
        output = Output(lambda normed, _: self.project(normed), (self.lm_head,))
        for j in range(self.config.lookahead):
            rotation = self.rotation(place_in_text + j, x.dtype)
            if j:
                token = batch.ids.gather(1, (order + 1 + j).clamp(max=length - 1))
                x = self.layer.inputs(self.target.embed(token).to(hidden.dtype), hidden)
                own.append(self.layer.keys_values(x, rotation))
            out = self.layer(x, hidden, rotation, lambda q: _attend_unrolled(q, k0, v0, causal, own))
            hidden = self.feed_back(out)
            yield UnrollStep(self.norm(out[where, place]), output, where, order[where, place])

    # decoding

    def start(self, taps: Tensor, ids: Tensor, mask: Tensor | None = None) -> EagleState:
        """Row i of the prompt pairs its taps with token i + 1; the root completes the last row."""
        if mask is not None and not bool(mask.all()):
            raise ValueError("padded prompts are not supported by eagle heads yet: decode one prompt at a time")
        return EagleState(self, taps, ids[:, 1:])

    def advance(self, state: EagleState, taps: Tensor, ids: Tensor) -> None:
        """Committed rows replace what was drafted, with the target's own taps."""
        state.commit(taps, ids)

    def grower(self, state: EagleState) -> EagleGrower:
        """Draft on from the committed rows."""
        return EagleGrower(state)


def _rows(values: Tensor, order: Tensor) -> Tensor:
    """(B, R, X) of (B, T, X) by row numbers (B, R)."""
    return values.gather(1, order[..., None].expand(-1, -1, values.shape[-1]))


def _attend_unrolled(q: Tensor, k0: Tensor, v0: Tensor, causal: Tensor, own: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention of unroll rows: step-0 keys that ``causal`` (B, R, T) shows, and one own key a later step.

    Shapes: q (B, heads, R, D), k0 and v0 (B, kv_heads, T, D), own (B, kv_heads, R, D) each. Query heads are
    grouped over their key head instead of repeating keys; the softmax is float32.
    """
    b, heads, r, d = q.shape
    kv = k0.shape[1]
    grouped = q.view(b, kv, heads // kv, r, d) * d**-0.5
    scores = torch.einsum("bkgrd,bktd->bkgrt", grouped, k0)
    scores = scores.masked_fill(~causal[:, None, None], float("-inf"))
    if own:
        diagonals = torch.stack([(grouped * k[:, :, None]).sum(-1) for k, _ in own], -1)
        scores = torch.cat([scores, diagonals], -1)
    weights = scores.float().softmax(-1).to(q.dtype) if q.dtype != torch.float64 else scores.softmax(-1)
    t = k0.shape[2]
    read = torch.einsum("bkgrt,bktd->bkgrd", weights[..., :t], v0)
    for step, (_, v) in enumerate(own):
        read = read + weights[..., t + step, None] * v[:, :, None]
    return read.reshape(b, heads, r, d)
