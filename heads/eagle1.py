"""EAGLE-1 and 2 (arXiv 2401.15077, 2406.16858): one decoder layer that regresses the target's next hidden state.

Row i reads the target's last hidden state f_i and the token that follows, x_{i+1}, fused by fc to the layer's input and
residual stream at once, without a norm; its output is taken for f_{i+1}: it drafts x_{i+2} through the target's own
output matrix, and is what the next step reads. So beside the loss on logits there is one on states, smooth L1.

EAGLE's own training takes one step from true states with a little noise on them (``lookahead: 1`` and ``noise``); with
a deeper look-ahead later steps read the heads' own states as they do in decoding (HASS, arXiv 2408.15766, which
detaches them between steps: ``detach``). EAGLE-2 drafts trees by confidence with the same heads (``heads/grow.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heads.autoregressive import Autoregressive
from heads.config import ConfigError, HeadsConfig
from heads.judge import TrainingBatch
from heads.layer import LAYER_DEFAULTS, DecoderLayer, layer_shape
from heads.precision import as_written
from heads.target import Target

DEFAULTS: dict[str, Any] = LAYER_DEFAULTS | {
    "bias": True,  # fc has one
    "feature_weight": 1.0,  # of the loss on states; EAGLE weighs that on logits a tenth of it (train.loss)
    "noise": 0.0,  # uniform, ± so much, on the states read in training; EAGLE's is 0.1
    "detach": False,  # no gradient from a step into those before it, as in HASS
    "position_decay": 1.0,  # weight of draft position j is this to the power j
}


class Eagle1(Autoregressive):
    """The heads; their one tap is the state that the target's output matrix reads.

    Raises:
        ConfigError: the tap is another one, or an option is out of its range.
    """

    def __init__(self, config: HeadsConfig, target: Target) -> None:
        super().__init__(config, target)
        o, width = config.options, config.hidden_size
        if config.taps != (target.num_layers,):
            raise ConfigError(
                f"eagle1 heads regress the state that the output matrix reads: their only tap is {target.num_layers} "
                f"here, not {list(config.taps)}"
            )
        if min(o["feature_weight"], o["noise"]) < 0:
            raise ConfigError("eagle1 options: feature_weight and noise must be 0 or more")
        self.fc = nn.Linear(2 * width, width, bias=bool(o["bias"]))
        self.layer = DecoderLayer(config, width)

    @classmethod
    def default_options(cls, target: Target) -> dict[str, Any]:
        """The layer takes the shape of the target's own."""
        return DEFAULTS | layer_shape(target)

    def initialize(self) -> None:
        """Start as the target's next-token head: fc hands the state through and the layer adds nothing."""
        width = self.config.hidden_size
        with torch.no_grad():
            for parameter in (*self.fc.parameters(), self.layer.o_proj.weight, self.layer.down_proj.weight):
                parameter.zero_()
            self.fc.weight[:, width:].fill_diagonal_(1.0)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.fc.weight.dtype

    def fuse(self, taps: Tensor) -> Tensor:
        """f (…, H): the tap itself, in training with noise."""
        taps = taps.to(self.dtype)
        noise = float(self.config.options["noise"]) if self.training else 0.0
        return taps + noise * (2 * torch.rand_like(taps) - 1) if noise else taps

    def inputs(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads is the residual stream itself, (B, n, H) both."""
        fused = self.fc(torch.cat([embedding, hidden], -1))
        return fused, fused

    def project(self, spoken: Tensor) -> Tensor:
        """The target's logits (…, Vd) of a state taken for its own."""
        return self.target.project_rows(spoken.to(self.target.dtype), self.draft_ids)  # heads may be wider

    @property
    def outputs(self) -> tuple[nn.Module, ...]:
        """The target's, which is not trained."""
        return ()

    def feed_back(self, out: Tensor) -> Tensor:
        """The next step's state."""
        return out.detach() if self.config.options["detach"] else out

    def terms(self, out: Tensor, batch: TrainingBatch, where: Tensor, at: Tensor) -> dict[str, Tensor]:
        """Smooth L1 between a step's output and the state that the target had there, (n,), a mean over its width."""
        weight = float(self.config.options["feature_weight"])
        if not weight:
            return {}
        wide = torch.promote_types(out.dtype, torch.float32)
        theirs = batch.hidden[where, at].to(wide)
        with as_written(out.device):
            return {"feature": weight * F.smooth_l1_loss(out.to(wide), theirs, reduction="none").mean(-1)}
