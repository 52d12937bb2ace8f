"""Decodes prompts with the package ``economize`` by its own loop, from a checkpoint that it wrote: chains, greedy."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import economize
import torch
from transformers import AutoModelForCausalLM

from .job import write_json


def run(job: dict[str, Any]) -> None:
    """Decode and write, for each prompt, the new tokens and the (drafted, accepted) counts of its rounds.

    Args:
        job: target, its dtype, checkpoint, prompts (lists of ids), drafts a round, max_new_tokens, stop ids, threads,
            and out, the file to write.
    """
    torch.set_num_threads(job["threads"])
    target: Any = AutoModelForCausalLM.from_pretrained(job["target"], dtype=getattr(torch, job["dtype"]))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = economize.load(target.to(device), job["checkpoint"])
    decoding = economize.DecodeConfig(cycle_length=job["drafts"] + 1, lossless=True)
    rows = []
    for ids in job["prompts"]:
        prompt = torch.tensor(ids, device=device)
        done = model.decode(prompt, job["max_new_tokens"], decoding=decoding, stop=job["stop"])
        rows.append({"tokens": done.tokens.tolist(), "rounds": [list(pair) for pair in done.acceptance]})
    write_json(Path(job["out"]), {"version": economize.__version__, "prompts": rows})


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
