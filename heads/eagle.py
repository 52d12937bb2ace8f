"""EAGLE-3 (arXiv 2503.01840): one decoder layer on fused taps that drafts on its own outputs.

The taps at a row are fused into one state, g_i = fc(taps_i); the layer's attention reads it beside the token that
follows, each under a norm of its own, and adds to it. ``heads/autoregressive.py`` says how it drafts and is trained.
The layer's weights and names follow the format that serving engines load (``heads/formats``).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from heads.autoregressive import Autoregressive
from heads.config import HeadsConfig
from heads.layer import LAYER_DEFAULTS, DecoderLayer, layer_shape
from heads.norm import RMSNorm
from heads.target import Target

DEFAULTS: dict[str, Any] = LAYER_DEFAULTS | {
    "position_decay": 0.8,  # weight of draft position j is this to the power j
    "fc_norm": False,  # EAGLE-3.1: a norm on each tap before they are fused
    "norm_output": False,  # EAGLE-3.1: feed the normed output to the next step
    "train_output": True,  # train the output matrix; it starts as the target's rows
    "uniform_start": True,  # first logits near uniform, as AdamW wants it; Muon gets further without
}


class EagleLayer(DecoderLayer):
    """Attention reads cat(norm(embedding), norm(hidden)), 2H wide, and the residual is hidden."""

    input_layernorm: RMSNorm
    hidden_norm: RMSNorm

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config, 2 * config.hidden_size, ("input_layernorm", "hidden_norm"))

    def inputs(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """What attention reads, (B, n, 2H)."""
        return torch.cat([self.input_layernorm(embedding), self.hidden_norm(hidden)], -1)


class Eagle(Autoregressive):
    """EAGLE-3 heads, with EAGLE-3.1's norms as options."""

    layer: EagleLayer
    later_options: ClassVar[dict[str, Any]] = {"window": 0, "uniform_start": True}
    starting: ClassVar[tuple[str, ...]] = ("uniform_start",)

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
        return DEFAULTS | layer_shape(target)

    def initialize(self) -> None:
        """The output matrix starts as the target's rows; with ``uniform_start`` the norm before it keeps the first
        logits near uniform.

        A fresh layer's output has nothing to do with the target's last state: its logits are confidently wrong, and
        AdamW takes a hundred steps to take that back. But a norm moves slowly, and a small one holds all later logits
        small; Muon, which moves the layer faster, is better off with one of ones.
        """
        weight = self.target.output.weight.detach()
        rows = (weight if self.draft_ids is None else weight[self.draft_ids]).float()
        self.lm_head.weight.data.copy_(rows)
        if self.config.options["uniform_start"]:
            self.norm.weight.data.fill_(1.0 / float(rows.norm(dim=1).mean()))

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.fc.weight.dtype

    def fuse(self, taps: Tensor) -> Tensor:
        """g (…, H) of taps (…, taps·H)."""
        taps = taps.to(self.dtype)
        if len(self.fc_norms):
            parts = taps.chunk(len(self.fc_norms), -1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norms, parts, strict=True)], -1)
        return self.fc(taps)

    def inputs(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`~heads.autoregressive.Autoregressive`."""
        return self.layer.inputs(embedding, hidden), hidden

    def spoken(self, out: Tensor) -> Tensor:
        """A step's output under the final norm."""
        return self.norm(out)

    def project(self, spoken: Tensor) -> Tensor:
        """Draft logits (…, Vd) of a normed output."""
        return self.target.transform(self.lm_head(spoken))

    @property
    def outputs(self) -> tuple[nn.Module, ...]:
        """The output matrix."""
        return (self.lm_head,)

    def feed_back(self, out: Tensor) -> Tensor:
        """The next step's hidden state of a step's output."""
        return self.norm(out) if self.config.options["norm_output"] else out
