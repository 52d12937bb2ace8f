"""A push that is killed, wherever it was, is completed by the next one: nothing is sent or committed twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from heads.base import DraftHeads
from heads.layout import target_files
from heads.push import push_folder
from heads.target import Target
from tests.hub.server import TOKEN, Hub
from tests.hub.world import heads_on, text_model

ROOT = Path(__file__).resolve().parents[2]
REPO = "org/bundle"
SCRIPT = """
import sys
from heads.push import push_folder
print("ready", flush=True)
push_folder(sys.argv[1], "org/bundle", token=sys.argv[2], with_plots=False)
"""


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle whose target is in several files."""
    target = Target(text_model(), name="org/target")
    heads_on(target).save_pretrained(tmp_path / "bundle", bundle=True, tokenizer=False)
    (tmp_path / "bundle" / "model.safetensors").unlink()
    target.model.save_pretrained(tmp_path / "bundle", max_shard_size="40KB")
    return tmp_path / "bundle"


# at which request the process is killed: the third file arrives; the first commit; the second one
@pytest.mark.parametrize(("request_", "at"), [("PUT /lfs/", 3), ("/commit/", 1), ("/commit/", 2)])
def test_a_killed_push_is_completed_by_a_second_one(request_: str, at: int, hub: Hub, bundle: Path) -> None:
    seen: Counter[str] = Counter()

    def kill(request: str) -> None:
        seen[request_] += request_ in request
        if seen[request_] == at and child.poll() is None:
            os.kill(child.pid, signal.SIGKILL)
            child.wait()

    env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    env |= {"HF_HOME": str(bundle.parent / "hf"), "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen([sys.executable, "-c", SCRIPT, str(bundle), TOKEN], env=env, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    hub.on_request = kill
    assert child.wait(timeout=120) == -signal.SIGKILL
    hub.on_request = lambda request: None
    deadline = time.monotonic() + 30
    while hub.connections and time.monotonic() < deadline:  # what the dead process sent is still being stored
        time.sleep(0.01)
    assert not hub.connections
    arrived, before = set(hub.blobs), len(hub.requests)
    assert len(arrived) >= 3

    pushed = push_folder(bundle, REPO, token=TOKEN, with_plots=False)
    puts = [request.removeprefix("PUT /lfs/") for request in hub.requests[before:] if request.startswith("PUT /lfs/")]
    shards = [name for name in target_files(bundle) if name.endswith(".safetensors")]
    assert len(set(puts)) == len(puts) and not arrived & set(puts), "what had arrived whole is sent again"
    assert len(hub.blobs) == len(shards) + 1
    assert len(hub.commits(REPO)) == 2 and set(hub.files(REPO)) == set(pushed.files)
    for name in shards:
        assert hub.files(REPO)[name] == (bundle / name).read_bytes()
    loaded = DraftHeads.from_pretrained(REPO, dtype=torch.float32)
    assert loaded.target.self_check() is None
    push_folder(bundle, REPO, token=TOKEN, with_plots=False)
    assert len(hub.commits(REPO)) == 2


def test_no_token_leaves_inside_a_text(hub: Hub, bundle: Path) -> None:
    settings = bundle / "generation_config.json"
    settings.write_text(settings.read_text().replace("{", f'{{"token": "{TOKEN}",', 1))
    with pytest.raises(ValueError, match=r"generation_config\.json holds what looks like an access token") as problem:
        push_folder(bundle, REPO, token=TOKEN)
    assert TOKEN not in str(problem.value) and hub.repos == {}
