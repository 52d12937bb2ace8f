"""A process that knows transformers only, and never imports our packages by name, decodes with what was pushed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi

from heads.target import Target
from tests.hub.server import TOKEN, Hub
from tests.hub.world import PROMPT, heads_on, plain_text, save_target

ROOT = Path(__file__).resolve().parents[2]

START = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(1)
ours = ("heads", "infer", "data", "train", "headstart", "tests")
before = [name for name in ours if name in sys.modules]
"""

HEADS = """
tokenizer = AutoTokenizer.from_pretrained("org/target")
model = AutoModelForCausalLM.from_pretrained("org/target", dtype=torch.float32)
inputs = tokenizer("PROMPT", return_tensors="pt")
text = model.generate(
    **inputs, custom_generate="org/heads", trust_remote_code=True, max_new_tokens=16, do_sample=False
)
print(json.dumps({"before": before, "tokens": text[0].tolist(), "drafted": "_headstart" in vars(model)}))
"""

BUNDLE = """
found = {"before": before}
for place in sys.argv[1:]:
    tokenizer = AutoTokenizer.from_pretrained(place)
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, trust_remote_code=True)
    inputs = tokenizer("PROMPT", return_tensors="pt")
    asked = {**inputs, "max_new_tokens": 16, "do_sample": False}
    if place == sys.argv[1]:
        sys.modules["infer"] = None  # as where the package is not installed
        try:
            model.generate(**asked)
        except ImportError as problem:
            found["missing"] = str(problem)
        del sys.modules["infer"]
    text = model.generate(**asked)
    found[place] = {"tokens": text[0].tolist(), "drafted": "_headstart" in vars(model)}
print(json.dumps(found))
"""


@pytest.fixture
def target(tmp_path: Path) -> Target:
    return Target.load(str(save_target(tmp_path / "target")), dtype=torch.float32)


def run(hub: Hub, script: str, folder: Path, *arguments: str) -> dict:
    """The script's last line, in a process of its own; our packages lie where installed ones would."""
    assert "import heads" not in script and "import infer" not in script
    env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(folder / "hf")}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", START + script.replace("PROMPT", PROMPT), *arguments]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_heads_of_a_repository(hub: Hub, target: Target, tmp_path: Path) -> None:
    api = HfApi(endpoint=hub.url, token=TOKEN)
    api.create_repo("org/target")
    api.upload_folder(repo_id="org/target", folder_path=tmp_path / "target")
    heads_on(target).push_to_hub("org/heads", target_name="org/target", token=TOKEN)
    found = run(hub, HEADS, tmp_path)
    assert found == {"before": [], "tokens": plain_text(target), "drafted": True}


def test_a_bundle_drafts_by_itself(hub: Hub, target: Target, tmp_path: Path) -> None:
    """Pushed, and in a folder that never was; without the package it says how to get it."""
    made = heads_on(target)
    made.push_to_hub("org/bundle", bundle=True, token=TOKEN)
    made.save_pretrained(tmp_path / "bundle", bundle=True)
    found = run(hub, BUNDLE, tmp_path, "org/bundle", str(tmp_path / "bundle"))
    assert found.pop("before") == []
    assert found.pop("missing") == "these heads need Headstart: run `pip install .` in a clone of it"
    assert list(found) == ["org/bundle", str(tmp_path / "bundle")]
    assert all(each == {"tokens": plain_text(target), "drafted": True} for each in found.values())
