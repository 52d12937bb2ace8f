"""The serving check: exported heads in vLLM, against vLLM without a draft and against our own engine.

`make serve-check` runs it, with heads that were really trained. vLLM lives in an environment of its own (``--python``)
on the processor; each export is one process of it. Greedy text must be the engine's own base's, token by token, and
acceptance by position within 0.03 of ours for the same look-ahead, over at least 2,000 rounds of each engine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from heads.base import DraftHeads
from heads.embedded import NAME, resolve
from heads.formats import export_heads
from heads.grow import Budget
from heads.store import read_config
from heads.target import Target
from infer import evaluate, generate
from infer.machine import machine
from infer.options import sample
from infer.progress import progress
from infer.prompts import read_prompts
from tests.serving.compare import ROUNDS, Run, compare, table
from tests.serving.resume import digest, resumed

TOGETHER = 16  # texts that either engine decodes at once
SHARE = {"eagle": 1.0, "medusa": 0.625}  # of the prompts: what is accepted less often makes more rounds of a text
# export → format, engine, vLLM's method, and which of the two heads
EXPORTS: dict[str, tuple[str, str | None, str, str]] = {
    "eagle3 flat": ("eagle3", None, "eagle3", "eagle"),
    "speculators": ("speculators", None, "eagle3", "eagle"),
    "medusa": ("medusa", "vllm", "medusa", "medusa"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run it; the exit status is 0 when everything is as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eagle", type=Path, required=True, help="folder of trained EAGLE-3 heads")
    parser.add_argument("--medusa", type=Path, required=True, help="folder of trained Medusa heads")
    parser.add_argument("--python", type=Path, required=True, help="interpreter of the environment that has vLLM")
    parser.add_argument("--out", type=Path, default=Path("runs/serving"), help="exports and results")
    parser.add_argument("--prompts", type=int, default=64, help="held-out prompts (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="at least so many (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(default: %(default)s)")
    parser.add_argument("--exports", nargs="*", choices=EXPORTS, default=list(EXPORTS), help="(default: all)")
    parser.add_argument("--resume", action="store_true", help="keep what an earlier run with this --out has decoded")
    args = parser.parse_args(arguments)
    args.python = args.python.absolute()  # unresolved: the link's place is the environment
    report = check(args)
    (args.out / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(table(report))
    return 0 if report["ok"] else 1


def check(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that was seen, as plain values."""
    args.out.mkdir(parents=True, exist_ok=True)
    folders = {"eagle": args.eagle, "medusa": args.medusa}
    name = read_config(args.eagle).target.name
    target = Target.load(name, dtype=getattr(torch, args.dtype))
    questions = evaluate.ask(read_prompts(sample(), limit=args.prompts), target.tokenizer())
    job: dict[str, Any] = {
        "model": str(Path(resolve(name)).resolve()) if name == NAME or Path(name).is_dir() else name,
        "dtype": args.dtype,
        "prompts": [question.ids[0].tolist() for question in questions],
        "max_new_tokens": args.max_new_tokens,
        "together": TOGETHER,
        "speculative": None,
        "python": str(args.python),
    }

    def run(part: str, **draft: Any) -> dict[str, Any]:
        wanted = job | draft
        return resumed(args.resume, args.out / part, wanted, serve, args.python, args.out / part, wanted)

    base = run("base")
    ours: dict[str, Run] = {}
    exports: dict[str, Any] = {}
    for export in args.exports:
        to, engine, method, which = EXPORTS[export]
        count = math.ceil(len(questions) * SHARE[which])
        asked = job["prompts"][:count]
        heads = DraftHeads.from_pretrained(folders[which], target)
        lookahead = heads.config.lookahead
        folder = args.out / export.replace(" ", "-")
        shutil.rmtree(folder, ignore_errors=True)
        export_heads(heads, to, folder, engine=engine)
        draft = {"method": method, "model": str(folder.resolve()), "num_speculative_tokens": lookahead}
        served = run(f"{folder.name}-run", prompts=asked, speculative=draft, digest=digest(folder))
        if which not in ours:
            own = {"prompts": asked, "dtype": args.dtype, "digest": digest(folders[which])}
            own["max_new_tokens"] = args.max_new_tokens
            given = target, heads, questions[:count], args.max_new_tokens
            found = resumed(args.resume, args.out / f"ours-{which}", own, decode, *given)
            ours[which] = Run.of(found, lookahead, args.max_new_tokens)
        exports[export] = compare(base | {"tokens": base["tokens"][:count]}, served, ours[which], rounds=args.rounds)
    return {
        "ok": all(found["ok"] for found in exports.values()),
        "full": args.rounds >= ROUNDS,
        "vllm": base["version"],
        "machine": machine(target.device),
        "target": name,
        "dtype": args.dtype,
        "prompts": len(questions),
        "max_new_tokens": args.max_new_tokens,
        "exports": exports,
    }


def decode(
    target: Target, heads: DraftHeads, questions: Sequence[evaluate.Question], new: int
) -> dict[str, list[list[int]]]:
    """Our own engine's texts and rounds, as :mod:`tests.serving.engine` has them: chains, as many texts at once."""
    chain = Budget.chain(heads.config.lookahead)
    tokens: list[list[int]] = []
    steps: list[list[int]] = []
    parts = [questions[i : i + TOGETHER] for i in range(0, len(questions), TOGETHER)]
    for part in progress(parts, len(parts), "decoding with Headstart"):
        longest = max(question.ids.shape[1] for question in part)
        ids = torch.cat([F.pad(question.ids, (longest - question.ids.shape[1], 0)) for question in part])
        mask = torch.tensor([[i >= longest - question.ids.shape[1] for i in range(longest)] for question in part])
        found = generate(
            target, ids, draft=heads, budget=chain, attention_mask=mask.long(), max_new_tokens=new, do_sample=False
        )
        for row, stats in zip(found.sequences.tolist(), found.row_stats, strict=True):
            tokens.append(row[longest : longest + stats.tokens])
            steps.append([stats.tokens - sum(r.emitted for r in stats.log), *(r.emitted for r in stats.log)])
    return {"tokens": tokens, "steps": steps}


def serve(python: Path, folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """One run of the engine; its log stays in ``folder``.

    Raises:
        OSError: it failed; the end of its log is told.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    threads = os.environ.get("OMP_NUM_THREADS") or str(torch.get_num_threads())
    environ = os.environ | {
        "LD_PRELOAD": str(python.parent.parent / "lib" / "libiomp5.so"),
        "OMP_NUM_THREADS": threads,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, not three that import the same
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [str(python), str(Path(__file__).with_name("engine.py")), str(folder / "job.json")]
    print(f"vLLM: {job['speculative'] or 'without a draft'}", file=sys.stderr, flush=True)
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        done = subprocess.run([*command, str(folder / "result.json")], env=environ, stdout=log, stderr=log, check=False)
    if done.returncode:
        end = "\n".join((folder / "log.txt").read_text(encoding="utf-8").splitlines()[-15:])
        raise OSError(f"vLLM failed ({done.returncode}); the end of {folder / 'log.txt'}:\n{end}")
    return dict(json.loads((folder / "result.json").read_text(encoding="utf-8")))


if __name__ == "__main__":
    sys.exit(main())
