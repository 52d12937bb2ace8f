"""Plain transformers decodes with pushed heads: ``model.generate(custom_generate="org/heads")`` in a new process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from heads.custom_generate.generate import generate
from heads.push import custom_code
from tests.hub.server import TOKEN, Hub
from tests.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import torch
from heads import DraftHeads, Target, build, make_config
from tests.hub.server import TOKEN
from tests.tiny import tiny_model

model = tiny_model("llama")
target = Target(model, name="org/tiny-target")
built = build(make_config("medusa", target, lookahead=2), target)
with torch.no_grad():
    for parameter in built.parameters():
        parameter.normal_(std=0.3)
built.push_to_hub("org/tiny-heads", token=TOKEN)

ids = torch.arange(8)[None]
asked = dict(max_new_tokens=24, do_sample=False)
plain = model.generate(ids, **asked)
hub = dict(custom_generate="org/tiny-heads", trust_remote_code=True)
fast = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **asked, **hub)
assert torch.equal(plain, fast), (plain, fast)
full = model.generate(ids, return_dict_in_generate=True, output_logits=True, **asked, **hub)
assert torch.equal(full.sequences, plain) and len(full.logits) == 24
(key, loaded) = vars(model)["_headstart"]
assert key[0] == "org/tiny-heads" and len(key[1]) == 40, key
pieces = []
class Streamer:
    def put(self, value): pieces.append(value)
    def end(self): pieces.append(None)
model.generate(ids, streamer=Streamer(), **asked, **hub)
streamed = torch.cat([piece.reshape(-1) for piece in pieces[:-1]])
assert pieces[-1] is None and torch.equal(streamed, plain[0]), pieces

built.save_pretrained("mine")
local = model.generate(ids, heads="mine", **asked, **hub)
assert torch.equal(plain, local) and vars(model)["_headstart"][0] == ("mine", None)
try:
    model.generate(ids, num_beams=2, **asked, **hub)
except ValueError as problem:
    assert "num_beams" in str(problem)
else:
    raise AssertionError("beam search must be refused")
print("same text")
"""


def test_transformers_runs_pushed_heads(tmp_path: Path) -> None:
    with Hub() as hub:
        env = os.environ | {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(tmp_path / "hf"),
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-c", SCRIPT]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("same text\n")
    assert TOKEN not in done.stdout + done.stderr


def test_the_file_asks_for_the_package_when_it_is_missing(tmp_path: Path) -> None:
    (tmp_path / "generate.py").write_text(custom_code("org/name", "0" * 40))
    ask = "import generate\ntry:\n    generate.generate(None)\nexcept ImportError as problem:\n    print(problem)"
    command = [sys.executable, "-S", "-c", ask]  # -S: without installed packages
    done = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True)
    assert "run `pip install .`" in done.stdout + done.stderr


def test_transformers_finds_no_import_to_refuse(tmp_path: Path) -> None:
    """It checks a file's imports before it runs it, and would advise to install a package called ``infer``."""
    from transformers.dynamic_module_utils import get_imports

    file = tmp_path / "generate.py"
    file.write_text(custom_code("org/name", "0" * 40))
    assert set(get_imports(file)) == {"os", "typing", "transformers"}


def test_unpushed_template_needs_heads() -> None:
    with pytest.raises(ValueError, match="pass heads="):
        generate(tiny_model("llama"), torch.arange(3)[None])
