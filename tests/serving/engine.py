"""vLLM on this machine's processor, run in an environment of its own: one job in, tokens and draft counts out.

Nothing of Headstart is imported here; it only knows the exported folder.

    python engine.py JOB.json RESULT.json

The job has ``model``, ``dtype``, ``prompts`` (token ids), ``max_new_tokens`` and ``speculative`` (vLLM's
``speculative_config``, or null for the engine's own base).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def decode(job: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens of every prompt; with a draft also how many rounds there were and what was accepted by position."""
    import vllm

    engine = vllm.LLM(
        model=job["model"],
        dtype=job["dtype"],
        speculative_config=job["speculative"],
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=4,
        enable_prefix_caching=False,
        disable_log_stats=False,
        seed=0,
    )
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    asked = vllm.SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"])
    answers = engine.generate(prompts, asked, use_tqdm=False)
    found: dict[str, Any] = {
        "version": vllm.__version__,
        "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
        "rounds": 0,
        "accepted": [],
    }
    for metric in engine.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            found["rounds"] += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            found["accepted"] = list(metric.values)
    return found


if __name__ == "__main__":
    given, result = (Path(argument) for argument in sys.argv[1:])
    result.write_text(json.dumps(decode(json.loads(given.read_text(encoding="utf-8")))), encoding="utf-8")
