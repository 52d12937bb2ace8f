"""vLLM on this machine's processor, run in an environment of its own: one job in, tokens and rounds out.

Nothing of Headstart is imported here; it only knows the exported folder.

    python engine.py JOB.json RESULT.json

The job has ``model``, ``dtype``, ``prompts`` (token ids), ``max_new_tokens``, ``together`` (prompts decoded at once)
and ``speculative`` (vLLM's ``speculative_config``, or null for the engine's own base).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def decode(job: dict[str, Any]) -> dict[str, Any]:
    """Greedy tokens of every prompt, and how many of them each step emitted: the prefill's one, then a round's each.

    ``drafts`` and ``accepted`` (by position) are the engine's own counters, over all rounds.
    """
    import vllm

    llm = vllm.LLM(
        model=job["model"],
        dtype=job["dtype"],
        speculative_config=job["speculative"],
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=job["together"],
        distributed_executor_backend="uni",  # in this process, which is the engine's own already
        enable_prefix_caching=False,
        disable_log_stats=False,
        seed=0,
    )
    engine = llm.llm_engine
    asked = vllm.SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"])
    for number, ids in enumerate(job["prompts"]):
        engine.add_request(str(number), {"prompt_token_ids": ids}, asked)
    tokens: list[list[int]] = [[] for _ in job["prompts"]]
    steps: list[list[int]] = [[] for _ in job["prompts"]]
    while engine.has_unfinished_requests():
        for answer in engine.step():
            number, known = int(answer.request_id), list(answer.outputs[0].token_ids)
            if len(known) > len(tokens[number]):
                steps[number].append(len(known) - len(tokens[number]))
                tokens[number] = known
    found: dict[str, Any] = {
        "version": vllm.__version__,
        "tokens": tokens,
        "steps": steps,
        "drafts": 0,
        "accepted": [],
    }
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            found["drafts"] += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            found["accepted"] = list(metric.values)
    return found


if __name__ == "__main__":
    given, result = (Path(argument) for argument in sys.argv[1:])
    result.write_text(json.dumps(decode(json.loads(given.read_text(encoding="utf-8")))), encoding="utf-8")
