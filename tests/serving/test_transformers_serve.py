"""A bundle behind transformers' own server, as docs/serving.md says: its answers are the target's, and drafted."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import heads
from heads.target import Target
from tests.tiny import tiny_model

ROOT = Path(__file__).resolve().parents[2]
FIRST, VOCAB, NEW = 0x4E00, 64, 24
QUESTION = "".join(chr(FIRST + token) for token in (5, 17, 42, 3, 60, 11))

# The command `transformers`, in a process that ends with whoever started it and notes how many tokens each of the
# target's passes reads. It names nothing of ours.
SERVER = """
import os, sys, threading
from importlib.metadata import entry_points
from torch.nn.modules.module import register_module_forward_pre_hook

threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
passes = open(sys.argv.pop(1), "a", buffering=1)

def note(module, args):
    if type(module).__name__ == "LlamaDecoderLayer" and module.self_attn.layer_idx == 0:
        print(args[0].shape[1], file=passes)

register_module_forward_pre_hook(note)
(command,) = entry_points(group="console_scripts", name="transformers")
sys.exit(command.load()())
"""


@dataclass(frozen=True)
class Server:
    """A running one: where it listens, and where its passes are noted."""

    port: int
    noted: Path

    def passes(self) -> list[int]:
        """How many tokens each pass of the target has read since this was last asked."""
        found = [int(line) for line in self.noted.read_text().split()]
        os.truncate(self.noted, 0)
        return found

    def ask(self, **fields: Any) -> str:
        """The answer's body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            body = json.dumps({"messages": [{"role": "user", "content": QUESTION}], **fields})
            connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
            assert answer.status == 200, text
            return text
        finally:
            connection.close()


@contextmanager
def serving(bundle: Path, folder: Path) -> Iterator[Server]:
    """The page's command, with a port that the system chooses."""
    command = [sys.executable, "-c", SERVER, str(folder / "passes"), "serve", str(bundle)]
    command += ["--trust-remote-code", "--host", "127.0.0.1", "--port", "0"]
    env = os.environ | {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    env |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    with (folder / "log").open("w") as log:
        child = subprocess.Popen(command, cwd=folder, env=env, stdin=subprocess.PIPE, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 300
        while not (told := re.search(r"running on http://127\.0\.0\.1:(\d+)", (folder / "log").read_text())):
            assert child.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[-3000:]
            time.sleep(0.05)
        yield Server(int(told[1]), folder / "passes")
    finally:
        child.kill()
        child.communicate()


def letters() -> Any:
    """A tokenizer whose tokens are a letter each, so that an answer's tokens can be read off its text."""
    backend = Tokenizer(models.WordLevel({chr(FIRST + i): i for i in range(VOCAB)}, unk_token=chr(FIRST)))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    made.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return made


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """``bundle``, and what its target says to the question; its heads know that text by heart."""
    folder = tmp_path_factory.mktemp("world")
    target = Target(tiny_model("llama", dtype=torch.float32), name="org/target")
    ids = letters()(QUESTION, return_tensors="pt")["input_ids"]
    text = target.model.generate(ids, max_new_tokens=NEW, do_sample=False)
    made = heads.build(heads.make_config("medusa", target, lookahead=1, options={"own_output": True}), target).float()
    made.initialize()
    with torch.no_grad():  # behind state i comes token i + 1, and the head is to say token i + 2
        states = target.model.model(text).last_hidden_state[0, :-2]
        wanted = torch.nn.functional.one_hot(text[0, 2:], VOCAB).float()
        made.get_parameter("outputs.0.weight").copy_((torch.linalg.pinv(states) @ wanted).T)
    made.save_pretrained(folder / "bundle", bundle=True, tokenizer=letters())
    return folder / "bundle", text[0, ids.shape[1] :].tolist()


def test_the_server_drafts_and_answers_as_the_target_would(world: tuple[Path, list[int]], tmp_path: Path) -> None:
    bundle, wanted = world
    asked = {"model": str(bundle), "max_tokens": NEW, "temperature": 0}
    with serving(bundle, tmp_path) as server:
        first = json.loads(server.ask(**asked))  # the heads are loaded, and the target looked at
        server.passes()
        answer = json.loads(server.ask(**asked))
        passes = server.passes()
        streamed = server.ask(**asked, stream=True)
        again = server.passes()
    said = answer["choices"][0]["message"]["content"]
    assert first["choices"] == answer["choices"]
    assert [ord(letter) - FIRST for letter in said] == wanted
    assert answer["usage"]["completion_tokens"] == NEW and answer["choices"][0]["finish_reason"] == "length"
    assert passes[0] == len(QUESTION) and set(passes[1:-1]) == {2}, "behind the prompt, a token and its draft each"
    assert len(passes) <= 2 + NEW // 2, "most drafts were right: two tokens a pass"
    rows = [json.loads(line.removeprefix("data: ")) for line in streamed.splitlines() if line.startswith("data: {")]
    pieces = [row["choices"][0]["delta"].get("content") or "" for row in rows if row["choices"]]
    assert "".join(pieces) == said and len([piece for piece in pieces if piece]) > 1 and again == passes
