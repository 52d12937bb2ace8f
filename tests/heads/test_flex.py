"""The fused attention of the unroll reads what the plain one does; its gradient is checked on a GPU (gpu_check.sh)."""

from __future__ import annotations

import pytest
import torch

from heads.attention import attend_rows
from heads.flex import attend_flex


def inputs(steps: int, heads: int = 4, kv: int = 2) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(3)
    b, r, t, d = 2, 5, 9, 16
    q, k0, v0 = torch.randn(b, heads, r, d), torch.randn(b, kv, t, d), torch.randn(b, kv, t, d)
    seen = torch.arange(t) <= torch.tensor([[0, 2, 3, 6, 8], [1, 4, 4, 5, 7]])[..., None]
    own = [(3 * torch.randn(b, kv, r, d), torch.randn(b, kv, r, d)) for _ in range(steps)]
    return q, k0, v0, seen, own  # type: ignore[return-value]


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("kv", [1, 2, 4])
@torch.no_grad()
def test_it_reads_what_the_plain_one_reads(steps: int, kv: int) -> None:
    given = inputs(steps, kv=kv)
    torch.testing.assert_close(attend_flex(*given), attend_rows(*given), rtol=1e-5, atol=1e-6)  # type: ignore[arg-type]


@torch.no_grad()
def test_a_row_too_many_is_seen() -> None:
    q, k0, v0, seen, own = inputs(2)
    more = seen.roll(1, -1) | seen
    assert (attend_flex(q, k0, v0, more, own) - attend_rows(q, k0, v0, seen, own)).abs().max() > 1e-2  # type: ignore[arg-type]
