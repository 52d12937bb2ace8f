"""What every test runs under: one thread a worker, no model hub, a fixed seed."""

from __future__ import annotations

import os

# Before torch and huggingface_hub are imported: they read these once. Child processes inherit them.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_DISABLE_XET="1",
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_MODE="offline",
)

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Each test starts from the same random state, whatever ran before it on its worker."""
    torch.manual_seed(0)
