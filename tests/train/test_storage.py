"""How states are rounded: what eight bits keep, and what stays in sixteen."""

from __future__ import annotations

import pytest
import torch

from train.storage import FP8, Storage


def test_plain_dtypes_only_round() -> None:
    storage = Storage(2, 3, torch.bfloat16)
    taps, hidden = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    read = storage.decode(storage.encode(taps, hidden))
    assert torch.equal(read[0], taps.bfloat16()) and torch.equal(read[1], hidden.bfloat16())


def test_eight_bits_keep_each_tap_at_its_own_scale() -> None:
    """Three bits of mantissa: at most 1/16 off, however large a tap is beside another; zeros stay zeros."""
    storage = Storage(3, 4, FP8)
    taps = torch.tensor([[1.0, -2.0, 0.5, 0.3], [3e4, -2e4, 1e3, 7e3], [0.0, 0.0, 0.0, 0.0]]).reshape(1, 12)
    hidden = torch.tensor([[1.01, -200.3, 0.5, 0.3]])
    columns = storage.encode(taps, hidden)
    assert columns["taps"].dtype == FP8 and columns["scales"].shape == (1, 3)
    torch.testing.assert_close(columns["scales"], torch.tensor([[2 / 448, 3e4 / 448, 1.0]]))
    read, kept = storage.decode(columns)
    assert read.dtype == torch.bfloat16
    torch.testing.assert_close(read.float(), taps, rtol=1 / 16, atol=0.0)
    assert float(read[0, 4]) == pytest.approx(3e4, rel=2**-8)  # the largest is kept as well as bfloat16 can
    assert torch.equal(kept, hidden.bfloat16())


def test_eight_bits_take_the_room_that_is_said() -> None:
    assert Storage(3, 576, torch.bfloat16).token_bytes == 4 * 576 * 2 + 4 + 4
    assert Storage(3, 576, FP8).token_bytes == 3 * 576 + 3 * 4 + 576 * 2 + 4 + 4
