"""Fetching: revision, subfolder, cache folder, offline; and one message each for what cannot be had."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub import HfApi

import infer
from heads.base import DraftHeads
from heads.hub import HubError, locate
from heads.target import Target
from headstart import main
from tests.hub.server import READ_TOKEN, TOKEN, Hub
from tests.hub.world import PROMPT, heads_on, plain_text, save_target, text_model

HEADS, TARGET = "org/heads", "org/target"


@pytest.fixture
def pushed(hub: Hub, tmp_path: Path) -> DraftHeads:
    """A target and heads of its own, both on the Hub and nowhere else."""
    folder = save_target(tmp_path / "target")
    api = HfApi(endpoint=hub.url, token=TOKEN)
    api.create_repo(TARGET)
    api.upload_folder(repo_id=TARGET, folder_path=folder)
    made = heads_on(Target(text_model(), name=TARGET))
    made.push_to_hub(HEADS, token=TOKEN)
    return made


def test_heads_bring_their_target(pushed: DraftHeads) -> None:
    loaded = DraftHeads.from_pretrained(HEADS, dtype=torch.float32)
    out = infer.generate(loaded.target, PROMPT, loaded, max_new_tokens=16, do_sample=False)
    assert out.sequences[0].tolist() == plain_text(loaded.target) and out.texts and out.stats.proposed > 0


def test_a_cache_folder_of_ones_own(pushed: DraftHeads, tmp_path: Path) -> None:
    own = tmp_path / "own"
    loaded = DraftHeads.from_pretrained(HEADS, dtype=torch.float32, cache_dir=own)
    assert {path.name for path in own.iterdir()} >= {"models--org--heads", "models--org--target"}
    assert loaded.target.tokenizer()("a")["input_ids"]
    assert not (tmp_path / "cache" / "models--org--target").exists()


def test_a_subfolder(hub: Hub, pushed: DraftHeads, tmp_path: Path) -> None:
    for name in ("config.json", "heads.safetensors"):
        hub.files(HEADS)[f"wide/{name}"] = hub.files(HEADS)[name]
    del hub.files(HEADS)["heads.safetensors"]
    loaded = DraftHeads.from_pretrained(HEADS, pushed.target, subfolder="wide")
    assert loaded.config == pushed.config
    with pytest.raises(HubError, match=r"org/heads on the Hub in deep/ has no config.json and no heads.safetensors"):
        DraftHeads.from_pretrained(HEADS, pushed.target, subfolder="deep")
    pushed.save_pretrained(tmp_path / "runs" / "best")
    assert DraftHeads.from_pretrained(tmp_path / "runs", pushed.target, subfolder="best").config == pushed.config


@pytest.mark.parametrize("how", ["environment", "argument"])
def test_offline_from_the_cache(
    how: str, hub: Hub, pushed: DraftHeads, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = {"local_files_only": True} if how == "argument" else {}
    DraftHeads.from_pretrained(HEADS, dtype=torch.float32).target.tokenizer()
    hub.requests.clear()
    if how == "environment":
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    loaded = DraftHeads.from_pretrained(HEADS, dtype=torch.float32, **options)
    assert loaded.target.tokenizer()(PROMPT)["input_ids"] and hub.requests == []
    message = r"org/other is not in the cache and the Hub may not be asked \(HF_HUB_OFFLINE, or local_files_only\)"
    with pytest.raises(HubError, match=message):
        DraftHeads.from_pretrained("org/other", **options)
    empty = str(tmp_path / "empty")
    with pytest.raises(HubError, match=r"org/heads is not in the cache"):
        DraftHeads.from_pretrained(HEADS, cache_dir=empty, **options)
    assert hub.requests == []


def test_half_a_download_offline_is_no_repository_without_heads(hub: Hub, pushed: DraftHeads) -> None:
    weights = locate(HEADS).folder / "heads.safetensors"
    weights.unlink()
    with pytest.raises(HubError, match="org/heads is not in the cache"):
        DraftHeads.from_pretrained(HEADS, pushed.target, local_files_only=True)
    assert DraftHeads.from_pretrained(HEADS, pushed.target).config == pushed.config, "and is completed with one"


def test_a_gated_target_is_one_clear_message(hub: Hub, pushed: DraftHeads) -> None:
    hub.repos[TARGET].gated = True
    for token in (None, READ_TOKEN):
        with pytest.raises(HubError) as problem:
            DraftHeads.from_pretrained(HEADS, dtype=torch.float32, token=token)
        told = str(problem.value)
        assert told.startswith(
            f"the target {TARGET} of these heads cannot be loaded: {TARGET} is gated: ask for access"
        )
        assert "hf auth login" in told and "\n" not in told and READ_TOKEN not in told
    assert DraftHeads.from_pretrained(HEADS, dtype=torch.float32, token=TOKEN).target.tokenizer()


def test_a_missing_target_is_one_clear_message(hub: Hub, pushed: DraftHeads, capfd: pytest.CaptureFixture[str]) -> None:
    del hub.repos[TARGET]
    assert main(["generate", HEADS, "hello"]) == 2
    assert capfd.readouterr().err.splitlines()[-1] == (
        "error: the target org/target of these heads cannot be loaded: there is no repository org/target on the Hub, "
        "or it is private and this token may not see it. If it is elsewhere now, name it: target=, or --target on the "
        "command line"
    )


def test_a_target_that_has_moved(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Recorded under a path of another machine, it is found by the name that is given."""
    folder = save_target(tmp_path / "target")
    heads_on(Target.load(str(folder), dtype=torch.float32)).save_pretrained(tmp_path / "heads")
    folder.rename(tmp_path / "moved")
    with pytest.raises(OSError, match=rf"the target {folder} of these heads cannot be loaded: there is no folder"):
        DraftHeads.from_pretrained(tmp_path / "heads")
    words = ["generate", str(tmp_path / "heads"), "hello", "--max-new-tokens", "4"]
    assert main(words) == 2
    assert main([*words, "--target", str(tmp_path / "moved")]) == 0
    text_model(seed=1).save_pretrained(tmp_path / "other")
    capsys.readouterr()
    assert main([*words, "--target", str(tmp_path / "other")]) == 2
    assert "same shape but other weights" in capsys.readouterr().err


def test_wrong_token_when_fetching(hub: Hub, pushed: DraftHeads) -> None:
    wrong = "hf_" + "wrong" * 6
    with pytest.raises(HubError, match="the Hub does not know this token") as problem:
        DraftHeads.from_pretrained(HEADS, pushed.target, token=wrong)
    assert wrong not in str(problem.value)


def test_a_token_that_may_only_read(hub: Hub, pushed: DraftHeads) -> None:
    with pytest.raises(HubError, match=f"this token may not write to {HEADS}"):
        pushed.push_to_hub(HEADS, token=READ_TOKEN)
    assert DraftHeads.from_pretrained(HEADS, pushed.target, token=READ_TOKEN).config == pushed.config


def test_a_full_disk_is_not_called_an_unreachable_hub(
    hub: Hub, pushed: DraftHeads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(HfApi, "snapshot_download", full)
    with pytest.raises(OSError, match="No space left on device") as problem:
        DraftHeads.from_pretrained(HEADS, pushed.target)
    assert not isinstance(problem.value, HubError)
