"""Every kind of heads goes to the Hub and back, and decodes by the file of its repository, as transformers calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from heads.base import DraftHeads
from heads.kinds import KINDS
from heads.target import Target
from headstart import main
from tests.heads.small import STORED, small_heads
from tests.hub.server import TOKEN, Hub
from tests.hub.world import text_model

REPO = "org/heads"


def test_no_kind_is_left_out() -> None:
    assert {case["kind"] for case in STORED.values()} == KINDS.keys()


@pytest.mark.parametrize("case", STORED)
def test_there_and_back(case: str, hub: Hub) -> None:
    made = small_heads(target=Target(text_model(), name="org/target"), **STORED[case]).float()
    made.push_to_hub(REPO, token=TOKEN)
    back = DraftHeads.from_pretrained(REPO, text_model())
    assert back.config == made.config and back.state_dict().keys() == made.state_dict().keys()
    assert all(torch.equal(back.state_dict()[name], value) for name, value in made.state_dict().items())
    card = hub.files(REPO)["README.md"].decode()
    assert f"| kind | {made.config.kind} |" in card and f"| parameters | {count(made):,} |" in card

    scope: dict[str, Any] = {"__name__": "generate"}
    exec(hub.files(REPO)["custom_generate/generate.py"], scope)
    model, ids = text_model(), torch.tensor([list(b"hello there")])
    asked = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(scope["generate"](model, ids, **asked), model.generate(ids, **asked))
    assert vars(model)["_headstart"][1].config == made.config


def count(heads: DraftHeads) -> int:
    """Numbers that are stored, without the map of the draft vocabulary."""
    return sum(value.numel() for value in heads.state_dict().values() if value.is_floating_point())


def test_an_adapter_is_merged_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Factors alone are no heads: what takes heads alone says what to do, and a broken record is named."""
    folder, out = str(tmp_path), str(tmp_path / "out")
    for name in ("adapter.json", "adapter.safetensors"):
        (tmp_path / name).write_text("{}")
    told = {
        "export": (["export", folder, "--to", "eagle3", "--out", out], "`headstart merge`"),
        "bundle": (["bundle", folder, "--out", out], "`headstart merge`"),
        "import": (["import", folder, "--target", "x", "--out", out], "`headstart merge`"),
        "push": (["push", folder, REPO], "adapter.json is not an adapter's record: it has no 'heads'"),
        "verify": (["verify", folder], "adapter.json is not an adapter's record: it has no 'heads'"),
    }
    for verb, (words, said) in told.items():
        assert main(words) == 2, verb
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("error: ") and said in error, verb
