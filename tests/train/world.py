"""A small world to train in: a random target on disk with a byte tokenizer, conversations, and a recipe."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

from heads.target import Target
from tests.data.toys import chat, tokenizer, write_jsonl
from tests.tiny import tiny_model
from train.conversations import Conversations

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "train" / "train_heads.py"
VOCAB = 264

RECIPE = """
data:
  train: {folder}/train.jsonl
  heldout: {folder}/heldout.jsonl
  feature_dtype: float32
  cache_folder: {folder}/cache
target: {{name: {folder}/target, dtype: float32}}
heads: {{kind: eagle, lookahead: 3, taps: [1, 2, 3], draft_vocab_size: 100}}
train: {{precision: no, batch_tokens: 160, micro_tokens: 160, max_steps: 6, lr: 3e-3, log_every: 1}}
eval: {{conversations: 5, prompts: 3, tokens: 8}}
output: {{folder: {folder}/run}}
"""


def write_world(folder: Path, *, conversations: int = 24, heldout: int = 5) -> Path:
    """Target, data and ``recipe.yaml`` under ``folder``; returns the recipe's path."""
    model = tiny_model("llama", dtype=torch.float32, vocab=VOCAB)
    model.save_pretrained(folder / "target")
    tokenizer().save_pretrained(folder / "target")
    for name, number, seed in (("train", conversations, 1), ("heldout", heldout, 2)):
        write_jsonl(folder / f"{name}.jsonl", [{"messages": one} for one in talk(number, seed)])
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=folder))
    return recipe


def talk(number: int, seed: int) -> list[list[dict[str, str]]]:
    """Conversations of unequal length."""
    dice = random.Random(seed)
    word = lambda: "".join(dice.choice("abcdefg ") for _ in range(dice.randrange(6, 22)))  # noqa: E731
    return [chat(*(word() for _ in range(dice.choice((2, 2, 4))))) for _ in range(number)]


def run(
    arguments: Sequence[str | Path], *, processes: int = 0, timeout: float = 240, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Launch the script: plainly, or as ``processes`` ranks under torchrun on gloo."""
    launcher = [sys.executable]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})}
    if processes:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        settings["ACCELERATE_USE_CPU"] = "true"
    return finished([*launcher, str(SCRIPT), *map(str, arguments)], timeout, settings)


def finished(
    words: Sequence[str], timeout: float, environ: dict[str, str], folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; at the limit it is asked to end, so that a launcher takes its workers with it."""
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = subprocess.Popen(words, text=True, env=environ, cwd=folder, **pipes)
    try:
        out, errors = started.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        started.terminate()
        try:
            started.communicate(timeout=40)
        finally:
            started.kill()
        raise
    return subprocess.CompletedProcess(words, started.returncode, out, errors)


def alive(number: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return str(psutil.Process(number).status()) != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def log_of(folder: Path) -> list[dict[str, Any]]:
    """Lines of a run's log.jsonl."""
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, float]:
    """Step → training loss."""
    return {line["step"]: line["train/loss"] for line in log_of(folder) if "train/loss" in line}


def half_way(source: Path, folder: Path) -> None:
    """A copy of a run of four steps as it was after its second."""
    shutil.copytree(source, folder)
    shutil.rmtree(folder / "heads")
    (folder / "report.json").unlink()
    shutil.rmtree(folder / "checkpoints" / "step-00000004")


@dataclass
class Rows:
    """As much of a ``datasets.Dataset`` as :class:`Conversations` asks for, in memory."""

    rows: list[dict[str, Any]]

    def with_format(self, *_: Any, **__: Any) -> Rows:
        return self

    def iter(self, batch_size: int) -> Any:
        for at in range(0, len(self.rows), batch_size):
            part = self.rows[at : at + batch_size]
            yield {name: [row[name] for row in part] for name in part[0]}

    def select(self, indices: Sequence[int]) -> Rows:
        return Rows([self.rows[index] for index in indices])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def conversations(lengths: Sequence[int], vocab: int = 64, prompt: int = 3) -> Conversations:
    """Random conversations of given lengths; all but the first ``prompt`` tokens are the answer."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for length in lengths:
        ids = torch.randint(vocab, (length,), generator=generator).numpy()
        rows.append({"input_ids": ids, "loss_mask": [t >= prompt for t in range(length)]})
    return Conversations(Rows(rows), "memory")


def tiny_target(dtype: torch.dtype = torch.float64) -> Target:
    """The random target in memory."""
    target = Target(tiny_model("llama", dtype=dtype), name="tiny")
    target.model.requires_grad_(False)
    return target
