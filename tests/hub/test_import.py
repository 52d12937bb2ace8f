"""Another project's checkpoint out of a Hub repository: imported by its id, safetensors alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi

from heads.base import DraftHeads
from heads.formats import export_heads
from heads.target import Target
from headstart import main
from tests.hub.server import TOKEN, Hub
from tests.hub.world import heads_on, save_target

REPO = "org/EAGLE3"


@pytest.fixture
def made(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DraftHeads:
    """Heads whose export is on the Hub, beside a pickle and a script; ``target`` lies in this folder."""
    monkeypatch.chdir(tmp_path)
    target = Target.load(str(save_target(tmp_path / "target", layers=8)), dtype=torch.float32)
    heads = heads_on(target, taps=(2, 4, 5), draft_vocab_size=None)
    export_heads(heads, "eagle3", tmp_path / "eagle3")
    (tmp_path / "eagle3" / "pytorch_model.bin").write_bytes(b"\x80\x04a pickle")
    (tmp_path / "eagle3" / "modeling.py").write_text("raise SystemExit('was run')")
    api = HfApi(endpoint=hub.url, token=TOKEN)
    api.create_repo(REPO)
    api.upload_folder(repo_id=REPO, folder_path=tmp_path / "eagle3")
    return heads


WORDS = ["import", REPO, "--target", "target", "--out", "heads"]


def test_by_its_id(hub: Hub, made: DraftHeads, capsys: pytest.CaptureFixture[str]) -> None:
    hub.requests.clear()
    assert main([*WORDS, "--revision", hub.commits(REPO)[-1].oid, "--lookahead", "2"]) == 0
    assert "eagle3: eagle heads, look-ahead 2, taps [2, 4, 5]" in capsys.readouterr().out
    assert not any("pytorch_model" in request or "modeling" in request for request in hub.requests)
    back = DraftHeads.from_pretrained("heads", made.target)
    assert replace(back.config, target=made.config.target) == made.config
    assert all(torch.equal(back.state_dict()[name], value) for name, value in made.state_dict().items())
    assert main([*WORDS[:-1], "other", "--revision", "gone"]) == 2
    assert f"{REPO} on the Hub has no revision 'gone'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        (["model.safetensors"], r"only as a pickle (pytorch_model.bin): fetch it (`hf download org/EAGLE3 --local-dir"),
        (["model.safetensors", "pytorch_model.bin"], "has none of model.safetensors, model.safetensors.index.json"),
    ],
)
def test_without_safetensors(
    gone: list[str], message: str, hub: Hub, made: DraftHeads, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in gone:
        del hub.files(REPO)[name]
    assert main(WORDS) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {REPO} on the Hub has ") and message in error and not Path("heads").exists()


def test_heads_of_this_project_are_not_imported(hub: Hub, made: DraftHeads, capsys: pytest.CaptureFixture[str]) -> None:
    made.push_to_hub("org/ours", target_name="org/target", token=TOKEN)
    assert main(["import", "org/ours", *WORDS[2:]]) == 2
    assert "org/ours on the Hub holds heads of this project: there is nothing to import" in capsys.readouterr().err
