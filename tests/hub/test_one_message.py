"""Whatever is wrong with a repository or token, each verb says it in one line, with status 2 and without the token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch

from heads.base import DraftHeads
from heads.hub import HubError, one_message
from heads.push import push_folder
from heads.target import Target
from headstart import main
from tests.hub.server import READ_TOKEN, TOKEN, Hub
from tests.hub.world import heads_on, save_target

HEADS = "org/heads"
WRONG = "hf_" + "wrong" * 6

FETCHING: dict[str, list[str]] = {
    "generate": ["generate", HEADS, "hello"],
    "eval": ["eval", HEADS],
    "bench": ["bench", HEADS],
    "verify": ["verify", HEADS],
    "export": ["export", HEADS, "--to", "eagle3", "--out", "out"],
    "import": ["import", HEADS, "--target", "target", "--out", "out"],
    "bundle": ["bundle", HEADS, "--out", "out"],
}


def _gated(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    hub.repos[HEADS].gated = True


def _away(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")


FAULTS: dict[str, tuple[Callable[[Hub, pytest.MonkeyPatch], object], str]] = {
    "missing": (lambda hub, patch: hub.repos.clear(), f"there is no repository {HEADS} on the Hub, or it is private"),
    "wrong token": (lambda hub, patch: patch.setenv("HF_TOKEN", WRONG), "the Hub does not know this token: log in"),
    "gated": (_gated, f"{HEADS} is gated: ask for access on its page, and log in with `hf auth login`"),
    "no connection": (_away, f"cannot reach the Hub for {HEADS}"),
    "no heads": (lambda hub, patch: hub.files(HEADS).clear(), f"{HEADS} on the Hub has no"),
}


@pytest.fixture
def world(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """``target`` and ``heads`` in this folder, the heads also on the Hub."""
    monkeypatch.chdir(tmp_path)
    made = heads_on(Target.load(str(save_target(tmp_path / "target", layers=8)), dtype=torch.float32), taps=(2, 4, 5))
    made.save_pretrained(tmp_path / "heads")
    push_folder(tmp_path / "heads", HEADS, target_name="org/target", token=TOKEN)
    return hub


def told(capfd: pytest.CaptureFixture[str]) -> str:
    """The last line that was said, which is the error; and nothing before it that a crash would leave."""
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err and WRONG not in out + err and READ_TOKEN not in out + err
    return err.splitlines()[-1]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("verb", FETCHING)
def test_fetching(
    verb: str, fault: str, world: Hub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    spoil, message = FAULTS[fault]
    spoil(world, monkeypatch)
    assert main(FETCHING[verb]) == 2
    assert told(capfd).startswith(f"error: {message}")
    assert not Path("out").exists() and not Path("certificate.json").exists()


@pytest.mark.parametrize(
    ("token", "repo_id", "message"),
    [
        (WRONG, "org/new", "the Hub does not know this token: log in with `hf auth login`"),
        ("", "org/new", "not logged in to the Hub: run `hf auth login`"),
        (READ_TOKEN, HEADS, f"this token may not write to {HEADS}"),
        (TOKEN, "forbidden/new", "this token may not write to forbidden/new"),
        (TOKEN, "a/b/c", "a/b/c is no Hub id: it must be ORG/NAME"),
    ],
)
def test_pushing(
    token: str,
    repo_id: str,
    message: str,
    world: Hub,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    before = len(world.commits(HEADS))
    assert main(["push", "heads", repo_id, "--target-name", "org/target"]) == 2
    assert told(capfd).startswith(f"error: {message}")
    assert len(world.commits(HEADS)) == before and set(world.repos) == {HEADS}


def test_storage_that_refuses_is_told_as_all_else(
    world: Hub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The client's other protocol of uploads, which it uses by default and this Hub does not speak."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    heads_on(Target.load("target", dtype=torch.float32), taps=(2, 4, 5), seed=1).save_pretrained("other")
    assert main(["push", "other", HEADS, "--target-name", "org/target"]) == 2
    assert told(capfd).startswith(f"error: cannot reach the Hub for {HEADS}: Network error: ")
    assert any("xet-write-token" in request for request in world.requests)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    assert main(["push", "other", HEADS, "--target-name", "org/target"]) == 0
    assert len(world.commits(HEADS)) == 4, "nothing had been committed"


def test_what_the_storage_client_raises_is_known_by_its_place() -> None:
    """It is written in Rust, and its errors are plain ones."""
    places = {"huggingface_hub._commit_api": HubError, "json.decoder": RuntimeError}
    for place, kind in places.items():
        scope = {"__name__": place}
        exec("def fails():\n    raise RuntimeError('CAS: Bearer hf_abcdef')", scope)
        with pytest.raises(kind, match="CAS") as problem, one_message("org/x"):
            scope["fails"]()  # type: ignore[operator]
        assert kind is RuntimeError or "hf_abcdef" not in str(problem.value)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\x00"])
def test_a_token_read_with_its_line_end_is_not_shown(end: str, world: Hub) -> None:
    """The client puts the header that it could not send into its message, token and all."""
    for call in (
        lambda: DraftHeads.from_pretrained(HEADS, token=TOKEN + end),
        lambda: push_folder("heads", HEADS, target_name="org/target", token=TOKEN + end),
    ):
        with pytest.raises(HubError, match="this token cannot be sent: it holds a line end") as problem:
            call()
        assert TOKEN not in str(problem.value)
