"""Muon whose rows are evened: torch's step, each row of it over what that row's steps have been lately.

Muon makes the singular values of a step alike, not its rows: some outputs of a layer move several times as far as
others, step after step. Scaled by a running mean square of each row (NorMuon, arXiv 2510.05491) all move alike. The
whole step is then made as long as Muon's would be if its singular values were quite alike; its few iterations leave
them apart, so that torch's own is shorter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROWS = "row_square"  # a row's running mean square, [rows, 1]: what is kept beside Muon's momentum
RMS = 0.2  # of a step's entries at a rate of 1, as AdamW's are about: torch's match_rms_adamw


class RowMuon(torch.optim.Muon):
    """Muon with rows of like length (NorMuon, arXiv 2510.05491).

    Args:
        params: as torch.optim.Muon's, two-dimensional.
        row_beta: share of a row's mean square that is kept from step to step, above 0 and below 1.
        settings: torch.optim.Muon's; ``adjust_lr_fn`` has no say, since the root mean square of a step's entries is 0.2
            times the rate whatever the matrix's shape.
    """

    def __init__(self, params: Any, row_beta: float, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.row_beta = row_beta

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Move all weights: torch's own step at a rate of 1 says where to, and its rows are scaled then."""
        weights = [(group, weight) for group in self.param_groups for weight in group["params"]]
        before = [weight.clone() for _, weight in weights]
        rates = [(group["lr"], group["weight_decay"]) for group in self.param_groups]
        for group in self.param_groups:
            group["lr"], group["weight_decay"] = 1.0, 0.0
        try:
            result = super().step(closure)
        finally:
            for group, (rate, decay) in zip(self.param_groups, rates, strict=True):
                group["lr"], group["weight_decay"] = rate, decay
        for (group, weight), old in zip(weights, before, strict=True):
            if weight.grad is None:  # asked here: a closure makes the gradients
                continue
            way = self._evened(weight, weight - old)
            weight.copy_(old * (1 - group["lr"] * group["weight_decay"]) + way * group["lr"])
        return result

    def _evened(self, weight: Tensor, way: Tensor) -> Tensor:
        """A step of a weight, [rows, columns] → the same with rows scaled, 0.2 the root mean square of its entries."""
        square, state = way.square().mean(1, keepdim=True), self.state[weight]
        if ROWS not in state:
            state[ROWS] = torch.zeros_like(square)
        # that the mean starts at zero makes all rows too long alike, which the length takes back
        state[ROWS].lerp_(square, 1 - self.row_beta)
        tiny = torch.finfo(way.dtype).tiny
        scaled = way / state[ROWS].sqrt().clamp_min(tiny)
        # entries are of the size of 1 by now, or all zero: a step that goes nowhere stays so
        return scaled * (RMS * way.numel() ** 0.5 / scaled.norm().clamp_min(torch.finfo(way.dtype).eps))
