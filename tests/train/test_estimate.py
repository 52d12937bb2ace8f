"""Sizes that are told beforehand: of files to the byte, of memory as it is counted while tensors come and go."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from train.estimate import LiveBytes, PassMemory, nbytes, size, stored_bytes

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": torch.zeros(3, 5), "b": torch.zeros(2, dtype=torch.int64), "c.d": torch.zeros(7, dtype=torch.uint8)},
        {"one": torch.zeros(())},
        {f"layer.{i}.wéight": torch.zeros(i, 2, dtype=torch.bfloat16) for i in range(13)},
        {str(dtype): torch.zeros(3, dtype=dtype) for dtype in (torch.float64, torch.float16, torch.bool, torch.int32)},
    ],
)
@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_a_file_is_as_large_as_was_said(
    tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None, tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / "file", metadata=metadata)
    told = stored_bytes({name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}, metadata)
    assert (tmp_path / "file").stat().st_size == told


def test_live_bytes_are_those_of_tensors_that_are_there() -> None:
    before = torch.ones(1000)
    with LiveBytes() as counted:
        first = before + 1  # 4000 bytes
        view = first[:10]  # none of its own
        second = first * 2  # 8000 in all
        del second
        third = first.double()  # 4000 + 8000
        assert (counted.now, counted.peak) == (12000, 12000)
        del first
        assert counted.now == 12000, "the view holds it"
        del view, third
        assert (counted.now, counted.peak) == (0, 12000)
        before.add_(1)
        assert counted.now == 0


def test_live_bytes_see_what_is_kept_for_the_backward_pass() -> None:
    weight = torch.ones(100, 100, requires_grad=True)  # 40,000 bytes; so has its gradient
    with LiveBytes() as counted:
        kept = (torch.ones(50, 100) @ weight).sigmoid()  # input and output are kept, 20,000 bytes each
        assert counted.now == 40_000
        kept.sum().backward()
        assert counted.peak >= 80_000
    del kept
    assert counted.now == 40_000


def test_a_pass_of_any_size_follows_from_three() -> None:
    memory = PassMemory(lambda length: 1000 + 30 * length + 2 * length**2)
    assert memory(1, 512) == pytest.approx(1000 + 30 * 512 + 2 * 512**2, rel=1e-6)
    assert memory(4, 100) == pytest.approx(1000 + 4 * (3000 + 20_000), rel=1e-6)


def test_sizes_in_words() -> None:
    assert [size(n) for n in (12, 2048, 3 * 2**20, 5 * 2**29)] == ["12 bytes", "2.0 KiB", "3.0 MiB", "2.50 GiB"]
    assert nbytes([torch.zeros(3), torch.zeros(2, dtype=torch.float64)]) == 28
