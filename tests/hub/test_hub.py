"""Push and fetch with the real ``huggingface_hub`` client against the small Hub of :mod:`tests.hub.server`."""

from __future__ import annotations

import hashlib
import logging
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch

import heads
from heads import hub as heads_hub
from heads import push as heads_push
from heads.base import DraftHeads
from heads.hub import HubError
from heads.target import Target
from tests.hub.server import TOKEN, Hub

REPO = "org/tiny-heads"
FILES = {"config.json", "heads.safetensors", "README.md", "custom_generate/generate.py"}
REPORT = {"tokens_per_round": 1.74, "accepted_per_position": [0.42, 0.19], "data": "650 conversations"}


def test_round_trip_is_bit_equal(hub: Hub, target: Target, trained: DraftHeads) -> None:
    url = trained.push_to_hub(REPO, report=REPORT, token=TOKEN)
    assert url.startswith(f"{hub.url}/{REPO}/tree/")
    assert set(hub.files(REPO)) == FILES
    loaded = DraftHeads.from_pretrained(REPO, target, dtype=torch.float32, token=TOKEN)
    assert loaded.config == trained.config
    there, here = loaded.state_dict(), trained.state_dict()
    assert there.keys() == here.keys()
    assert all(torch.equal(there[name], here[name]) and there[name].dtype == here[name].dtype for name in here)


def test_code_names_the_commit_that_holds_the_weights(hub: Hub, trained: DraftHeads) -> None:
    trained.push_to_hub(REPO, token=TOKEN)
    code = hub.files(REPO)["custom_generate/generate.py"].decode()
    scope: dict[str, object] = {}
    exec(compile(code, "generate.py", "exec"), scope)
    assert scope["REPOSITORY"] == REPO
    pinned = hub.files(REPO, str(scope["COMMIT"]))
    assert pinned["heads.safetensors"] == hub.files(REPO)["heads.safetensors"]


def test_only_the_named_files_leave_a_run_folder(hub: Hub, trained: DraftHeads, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained.save_pretrained(run)
    (run / ".env").write_text("HF_TOKEN=secret")
    (run / ".git").mkdir()
    (run / ".git" / "config").write_text("[core]")
    (run / "optimizer.pt").write_bytes(b"state")
    (run / "README.md").write_text("a card of the run's own, not the one that is written from the report")
    heads_push.push_folder(run, REPO, token=TOKEN)
    assert set(hub.files(REPO)) == FILES
    assert b"own, not the one" not in hub.files(REPO)["README.md"]


def test_pushing_again_changes_nothing(hub: Hub, trained: DraftHeads) -> None:
    first = trained.push_to_hub(REPO, report=REPORT, token=TOKEN)
    commits, files = len(hub.commits(REPO)), dict(hub.files(REPO))
    assert trained.push_to_hub(REPO, report=REPORT, token=TOKEN) == first
    assert len(hub.commits(REPO)) == commits
    assert hub.files(REPO) == files


@pytest.mark.parametrize("where", ["PUT /lfs/", f"POST /api/models/{REPO}/commit/", "POST /lfs-verify"])
def test_retry_after_a_failed_push_does_not_duplicate(hub: Hub, trained: DraftHeads, where: str) -> None:
    hub.repos.clear()
    # the client itself retries a 500 of some requests; whatever it gives up on is pushed again here
    hub.fail_next = [where]
    try:
        trained.push_to_hub(REPO, token=TOKEN)
    except HubError as problem:
        assert "500" in str(problem)
        trained.push_to_hub(REPO, token=TOKEN)
    assert hub.fail_next == []
    assert set(hub.files(REPO)) == FILES
    assert len(hub.commits(REPO)) == 2


def test_retry_after_the_card_failed_keeps_the_weights_commit(
    hub: Hub, trained: DraftHeads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> str:
        raise OSError("killed between the two commits")

    with monkeypatch.context() as broken, pytest.raises(OSError, match="killed"):
        broken.setattr(heads_push, "custom_code", fails)
        trained.push_to_hub(REPO, token=TOKEN)
    assert len(hub.commits(REPO)) == 1
    trained.push_to_hub(REPO, token=TOKEN)
    assert len(hub.commits(REPO)) == 2


def test_new_weights_are_a_new_commit(hub: Hub, target: Target, trained: DraftHeads) -> None:
    trained.push_to_hub(REPO, token=TOKEN)
    before = hub.files(REPO)["custom_generate/generate.py"]
    other = heads.build(trained.config, target)
    with torch.no_grad():
        next(other.parameters()).add_(1.0)
    other.push_to_hub(REPO, token=TOKEN)
    assert len(hub.commits(REPO)) == 4
    assert hub.files(REPO)["custom_generate/generate.py"] != before


def test_a_branch_and_its_revision(hub: Hub, target: Target, trained: DraftHeads) -> None:
    trained.push_to_hub(REPO, revision="v2", token=TOKEN)
    assert hub.commits(REPO) == []
    assert set(hub.files(REPO, "v2")) == FILES
    DraftHeads.from_pretrained(REPO, target, revision="v2", token=TOKEN)
    with pytest.raises(HubError, match=r"org/tiny-heads on the Hub has no revision 'v3'"):
        DraftHeads.from_pretrained(REPO, target, revision="v3", token=TOKEN)


def test_download_takes_nothing_else(hub: Hub, trained: DraftHeads) -> None:
    trained.push_to_hub(REPO, token=TOKEN)
    hub.files(REPO)["pytorch_model.bin"] = b"\x80\x04pickle"
    folder = heads_hub.fetch(REPO, token=TOKEN)
    assert {path.name for path in folder.rglob("*") if not path.is_dir()} == {"config.json", "heads.safetensors"}
    assert not any("pytorch_model" in request for request in hub.requests)


def test_wrong_token_is_one_clear_message(hub: Hub, trained: DraftHeads) -> None:
    wrong = "hf_" + "wrong" * 6
    with pytest.raises(HubError) as problem:
        trained.push_to_hub(REPO, token=wrong)
    assert str(problem.value) == (
        "the Hub does not know this token: log in with `hf auth login`, or pass another token="
    )
    assert hub.repos == {}


def test_no_token_is_one_clear_message(hub: Hub, trained: DraftHeads) -> None:
    with pytest.raises(HubError, match=r"hf auth login"):
        trained.push_to_hub(REPO)


def test_no_right_to_write(hub: Hub, trained: DraftHeads) -> None:
    with pytest.raises(HubError, match=r"this token may not write to forbidden/heads"):
        trained.push_to_hub("forbidden/heads", token=TOKEN)


def test_missing_repository_is_one_clear_message(hub: Hub, target: Target) -> None:
    with pytest.raises(HubError) as problem:
        DraftHeads.from_pretrained("org/none", target, token=TOKEN)
    assert str(problem.value) == (
        "there is no repository org/none on the Hub, or it is private and this token may not see it"
    )


def test_repository_without_heads(hub: Hub, target: Target, trained: DraftHeads) -> None:
    trained.push_to_hub(REPO, token=TOKEN)
    del hub.files(REPO)["heads.safetensors"]
    with pytest.raises(HubError, match=r"org/tiny-heads on the Hub has no heads.safetensors"):
        DraftHeads.from_pretrained(REPO, target, token=TOKEN)


def test_no_connection(hub: Hub, target: Target, trained: DraftHeads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match=r"cannot reach the Hub for org/none"):
        DraftHeads.from_pretrained("org/none", target)
    with pytest.raises(HubError, match=r"cannot reach the Hub"):
        trained.push_to_hub(REPO, token=TOKEN)


def test_private_is_kept(hub: Hub, target: Target, trained: DraftHeads) -> None:
    trained.push_to_hub(REPO, private=True, token=TOKEN)
    assert hub.repos[REPO].private
    with pytest.raises(HubError, match="it is private"):
        DraftHeads.from_pretrained(REPO, target)
    trained.push_to_hub("org/public", token=TOKEN)
    before = len(hub.commits("org/public"))
    with pytest.raises(HubError, match="exists and is public"):
        trained.push_to_hub("org/public", private=True, token=TOKEN)
    assert len(hub.commits("org/public")) == before


def test_token_is_nowhere(
    hub: Hub,
    target: Target,
    trained: DraftHeads,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    caplog.set_level(logging.DEBUG)
    trained.push_to_hub(REPO, report=REPORT, token=TOKEN)
    DraftHeads.from_pretrained(REPO, target, token=TOKEN)
    with pytest.raises(HubError) as problem:
        DraftHeads.from_pretrained("org/none", target, token=TOKEN)
    out, err = capfd.readouterr()
    pushed = b"".join(hub.files(REPO).values())
    assert TOKEN not in caplog.text + out + err + str(problem.value)
    assert TOKEN.encode() not in pushed
    assert not any(TOKEN.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_target_known_by_a_local_path(hub: Hub, trained: DraftHeads, tmp_path: Path) -> None:
    local = Target(trained.target.model, name=str(tmp_path))
    mine = heads.build(heads.make_config("medusa", local, lookahead=2), local)
    with pytest.raises(ValueError, match="target_name="):
        mine.push_to_hub(REPO, token=TOKEN)
    assert hub.requests == []
    mine.push_to_hub(REPO, target_name="org/tiny-target", token=TOKEN)
    assert str(tmp_path).encode() not in b"".join(hub.files(REPO).values())


def test_truncated_weights_are_not_pushed(hub: Hub, trained: DraftHeads, tmp_path: Path) -> None:
    trained.save_pretrained(tmp_path / "heads")
    weights = tmp_path / "heads" / "heads.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        heads_push.push_folder(tmp_path / "heads", REPO, token=TOKEN)
    assert hub.requests == []


def test_second_fetch_downloads_nothing(hub: Hub, trained: DraftHeads) -> None:
    trained.push_to_hub(REPO, token=TOKEN)
    folder = heads_hub.fetch(REPO, token=TOKEN)
    hub.requests.clear()
    assert heads_hub.fetch(REPO, token=TOKEN) == folder
    assert not any(request.startswith("GET") and "/resolve/" in request for request in hub.requests)


def test_a_folder_is_itself(trained: DraftHeads, tmp_path: Path) -> None:
    trained.save_pretrained(tmp_path / "a")
    assert heads_hub.fetch(tmp_path / "a") == tmp_path / "a"
    with pytest.raises(ValueError, match="no revision"):
        heads_hub.fetch(tmp_path / "a", revision="main")
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(FileNotFoundError, match="no folder"):
        heads_hub.fetch(tmp_path / "a")


def test_server_refuses_bytes_that_differ_from_their_hash(hub: Hub) -> None:
    """The server checks what it is given, so that a round trip that passes means the bytes arrived."""
    import urllib.error
    import urllib.request

    wrong = hashlib.sha256(b"other").hexdigest()
    request = urllib.request.Request(f"{hub.url}/lfs/{wrong}", data=b"bytes", method="PUT")
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(request)
