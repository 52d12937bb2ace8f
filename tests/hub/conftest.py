"""A running small Hub for each test, and heads to push to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import huggingface_hub.hf_api
import pytest
import torch

import heads
from heads.base import DraftHeads
from heads.target import Target
from tests.hub.server import Hub
from tests.tiny import tiny_model


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A running Hub that the client takes for the only one, with an empty cache and nobody logged in."""
    with Hub() as running:
        for name, value in {
            "ENDPOINT": running.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": running.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_TOKEN_PATH": str(tmp_path / "no-token"),
        }.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", running.url)  # of functions such as list_repo_tree
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between its own retries
        yield running


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama"), name="org/tiny-target")


@pytest.fixture(scope="module")
def trained(target: Target) -> DraftHeads:
    built = heads.build(heads.make_config("medusa", target, lookahead=2), target)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_()
    return built
