"""Certificates of heads wherever they lie: folder, bundle, Hub repository, checkpoint as another project stores it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi

import infer.decode
from heads.formats import export_heads
from heads.push import push_folder
from heads.target import Target
from headstart import main
from tests.data import toys
from tests.hub.server import TOKEN, Hub
from tests.hub.world import heads_on, save_target

QUICK = ["--prompts-count", "1", "--max-new-tokens", "6", "--draws", "12", "--top-k", "3"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``target``, ``heads``, ``bundle``, and exports of the heads; prompts beside them."""
    folder = tmp_path_factory.mktemp("world")
    target = Target.load(str(save_target(folder / "target", layers=8)), dtype=torch.float32)
    made = heads_on(target, taps=(2, 4, 5))
    made.save_pretrained(folder / "heads")
    made.save_pretrained(folder / "bundle", bundle=True)
    export_heads(made, "eagle3", folder / "eagle3")
    export_heads(made, "speculators", folder / "speculators", dtype=torch.bfloat16)
    rows = [{"messages": toys.chat(f"tell me {n}", "no")} for n in range(4)]
    toys.write_jsonl(folder / "prompts.jsonl", rows)
    return folder


def verify(world: Path, *words: Any) -> int:
    return main(["verify", *map(str, words), "--prompts", str(world / "prompts.jsonl"), *QUICK])


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("name", "words", "form", "weights"),
    [
        ("heads", [], "headstart", "heads.safetensors"),
        ("bundle", [], "headstart", "heads/heads.safetensors"),
        ("eagle3", ["--target"], "checkpoint", "model.safetensors"),
        ("speculators", [], "checkpoint", "model.safetensors"),
    ],
)
def test_a_folder_of_any_form(
    name: str, words: list[str], form: str, weights: str, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*words, str(world / "target")] if words else []
    assert verify(world, world / name, *words) in (0, 1)
    certificate = json.loads((world / name / "certificate.json").read_text())
    assert certificate["heads"] == {
        "name": str(world / name),
        "sha256": sha256(world / name / weights),
        "form": form,
        "kind": "eagle",
        "commit": None,
    }
    assert certificate["greedy"]["float32"]["identical"] and certificate["greedy"]["bfloat16"]["passed"]
    assert all(block["passed"] for block in certificate["sampled"]["drafts"].values())
    assert len(certificate["settings"]["prompts_sha256"]) == len(certificate["target"]["sha256"]) == 64
    assert "beside model.generate" in capsys.readouterr().out


def test_a_checkpoint_that_names_no_target_asks_for_it(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(world, world / "eagle3") == 2
    assert "does not say which target it is for: name it with --target" in capsys.readouterr().err
    assert verify(world, world / "target", "--target", world / "target") == 2
    assert "is of none of the formats" in capsys.readouterr().err
    assert verify(world, "org/nowhere/at all") == 2


def test_repositories_are_certified_at_a_commit_and_the_card_says_so(
    hub: Hub, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of heads, of a bundle, of an exported checkpoint; the bundle's certificate goes up with it the next time."""
    monkeypatch.chdir(tmp_path)
    push_folder(world / "bundle", "org/bundle", token=TOKEN)
    api = HfApi(endpoint=hub.url, token=TOKEN)
    api.create_repo("org/eagle3")
    api.upload_folder(repo_id="org/eagle3", folder_path=world / "eagle3", ignore_patterns=["certificate.json"])
    for repo, words in {"org/bundle": [], "org/eagle3": ["--target", world / "target"]}.items():
        assert verify(world, repo, *words) in (0, 1)
        certificate = json.loads((tmp_path / "certificate.json").read_text())
        assert certificate["heads"]["name"] == repo and certificate["heads"]["commit"] == hub.commits(repo)[-1].oid
        (tmp_path / "certificate.json").rename(tmp_path / f"{repo.rpartition('/')[2]}.json")

    (world / "bundle" / "certificate.json").write_bytes((tmp_path / "bundle.json").read_bytes())
    push_folder(world / "bundle", "org/bundle", token=TOKEN)
    held = json.loads(hub.files("org/bundle")["certificate.json"])
    assert held["heads"]["name"] == "org/bundle" and held["target"]["name"] == "org/bundle"
    assert str(world) not in json.dumps(held)
    card = hub.files("org/bundle")["README.md"].decode()
    assert "## Certificate" in card and "| greedy, float32 | 2 texts, 12 tokens: no difference |" in card
    other = json.loads((tmp_path / "eagle3.json").read_text())
    (world / "bundle" / "certificate.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match="the certificate report is of other weights"):
        push_folder(world / "bundle", "org/bundle", token=TOKEN)


def test_a_decoder_that_is_wrong_fails_with_status_1(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that accepts whatever was drafted: its text is not the target's, far from any near-tie."""
    from infer.verify import Verdict

    monkeypatch.setattr(
        infer.decode,
        "choose_rule",
        lambda *args, **options: lambda draft, at, chooser: Verdict(list(range(len(draft)))[:1], 7),
    )
    assert verify(world, world / "heads") == 1
    shown = capsys.readouterr().out
    assert "NOT LOSSLESS" in shown and "NOT A NEAR-TIE" in shown
