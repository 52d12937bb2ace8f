"""Root-mean-square norm (arXiv 1910.07467) whose output keeps the input's dtype under autocast."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.RMSNorm):
    """As torch's own, but float32 weights do not promote half-precision inputs (and do not warn about them)."""

    def forward(self, x: Tensor) -> Tensor:
        """(…, H) → (…, H)."""
        assert self.weight is not None
        return F.rms_norm(x, tuple(self.normalized_shape), self.weight.to(x.dtype), self.eps)
