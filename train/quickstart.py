"""The whole job on the embedded target, as ``make quickstart`` runs it: train, evaluate, time, show.

    embedded target ─► train/train_heads.py (configs/quickstart.yaml) ─► heads
    held-out prompts ─► really decoded: tokens per round ─► timed beside plain decoding ─► checked in float32
    one answer, accepted draft tokens marked ─► summary.json

Prompts are held out from training, and those that choose the draft's size are not among those it is timed on.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from heads.base import DraftHeads
from heads.embedded import embedded_folder
from heads.grow import Budget
from heads.store import read_config
from heads.target import Target
from infer import bench, certify, evaluate, show
from infer.drafters import HeadsDrafter
from infer.generate import generate
from infer.prompts import read_prompts
from train.assemble import BUILTIN
from train.output import HEADS, write_whole
from train.train_heads import train

WARMUP, TIMED, DECODED, CHECKED = 5, 10, 20, 4
TOKENS, CHECKED_TOKENS = 64, 40
TREE = Budget(rows=32, depth=5, width=8)
CHAIN = Budget.chain(5)
QUESTION = "Can you give me three tips for learning to cook at home?"


class Stages:
    """Seconds by stage; says what begins."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, text: str) -> Iterator[None]:
        """Time a stage."""
        print(f"\n── {text}", flush=True)
        started = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - started, 1)


def quickstart(folder: str | Path = "runs/quickstart", arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Run it all; what was finished before is found again.

    Args:
        folder: where heads/ and summary.json are written.
        arguments: settings for the training, as ``train/train_heads.py`` takes them.

    Returns:
        The summary that stands in summary.json.
    """
    folder, stages = Path(folder), Stages()
    with stages.stage("target", "the embedded target: a real 135M model, dequantized once"):
        print(f"weights in {embedded_folder()}")
    with stages.stage("train", "training draft heads on its hidden states (the target stays as it is)"):
        trained = train(["--config", "configs/quickstart.yaml", "--output.folder", str(folder), *arguments])
    heads = DraftHeads.from_pretrained(folder / HEADS, dtype=torch.bfloat16)
    target, drafter = heads.target, HeadsDrafter(heads)
    questions = evaluate.ask(read_prompts(BUILTIN["builtin:heldout"]), target.tokenizer())
    warmup, timed = questions[:WARMUP], questions[WARMUP : WARMUP + TIMED]
    with stages.stage("evaluate", f"decoding {DECODED} held-out prompts with the heads"):
        budgets = {f"chain {CHAIN.depth}": CHAIN, f"tree {TREE.rows}": TREE}
        settings = evaluate.Settings(max_new_tokens=TOKENS)
        evaluation = evaluate.evaluate(target, drafter, questions[WARMUP : WARMUP + DECODED], budgets, settings)
        print(evaluate.table(evaluation))
    with stages.stage("bench", f"timing {len(timed)} of them, interleaved with decoding without a draft"):
        timing = bench.bench(target, drafter, timed, warmup, max_new_tokens=TOKENS)
        print(bench.table(timing))
    with stages.stage("verify", "checking in float32 that the text is the target's own"):
        exact = _exact(folder, questions[WARMUP : WARMUP + CHECKED])
        verdict = "identical to model.generate" if exact["identical"] else f"differences: {exact['differences']}"
        print(f"{exact['texts']} texts, {exact['positions']} positions: {verdict}")
    with stages.stage("answer", QUESTION):
        answer = generate(target, [{"role": "user", "content": QUESTION}], heads, budget=TREE, max_new_tokens=96)
        _show(answer, target)
    summary = _summary(trained, evaluation, timing, exact, target, stages)
    write_whole(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    print(f"\n── done\n{_lines(summary, folder)}")
    return summary


def _exact(folder: Path, questions: Sequence[evaluate.Question]) -> dict[str, Any]:
    """Greedy text as a chain and as a tree beside ``model.generate``, in float32."""
    heads = DraftHeads.from_pretrained(folder / HEADS, dtype=torch.float32, target=_float32_target(folder))
    plan = certify.Plan(budgets={"chain": CHAIN, "tree": TREE}, law_budgets={}, max_new_tokens=CHECKED_TOKENS)
    return certify.greedy_identity(heads.target, HeadsDrafter(heads), questions, plan)


def _float32_target(folder: Path) -> Target:
    return Target.load(read_config(folder / HEADS).target.name, dtype=torch.float32)


def _show(answer: Any, target: Target) -> None:
    colour, tokenizer = show.wants_colour(sys.stdout), target.tokenizer()
    new = answer.sequences[0].tolist()[-answer.stats.tokens :]
    print(show.render(new, answer.stats.log, tokenizer, colour))
    print(show.caption(answer.stats, colour))


def _summary(
    trained: dict[str, Any],
    evaluation: dict[str, Any],
    timing: dict[str, Any],
    exact: dict[str, Any],
    target: Target,
    stages: Stages,
) -> dict[str, Any]:
    chain, tree = (evaluation["budgets"][name] for name in (f"chain {CHAIN.depth}", f"tree {TREE.rows}"))
    return {
        "tokens_per_round": chain["loop_free_tokens_per_round"]["value"],
        "tokens_per_round_tree": tree["loop_free_tokens_per_round"]["value"],
        "tokens_per_round_with_loops": chain["tokens_per_round"]["value"],
        "accepted_per_position": chain["loop_free_accepted_per_position"],
        "speedup": timing["speedup"],
        "speedup_pooled": timing["speedups"]["pooled_loop_free"],
        "baseline": timing["baseline"],
        "forward_share": timing["forward_share"],
        "budget": timing["budget"],
        "greedy_identical": exact["identical"],
        "target": target.name,
        "seconds": stages.seconds | {"total": round(sum(stages.seconds.values()), 1)},
        "evaluation": evaluation,
        "bench": timing,
        "draft_vocabulary": trained["draft_vocabulary"],
        "training": {key: trained[key] for key in ("steps", "seconds", "data", "versions")},
    }


def _lines(summary: dict[str, Any], folder: Path) -> str:
    accepted = ", ".join(f"{value:.2f}" for value in summary["accepted_per_position"])
    return "\n".join(
        [
            f"tokens per round, held out, loop-free   chain {summary['tokens_per_round']:.2f}, "
            f"tree {summary['tokens_per_round_tree']:.2f}",
            f"accepted by position (chain)            {accepted}",
            f"speed-up over the faster baseline       {summary['speedup']:.2f} (median over prompts, loop-free)",
            f"same text as the target, float32        {'yes' if summary['greedy_identical'] else 'NO'}",
            f"heads                                   {folder / HEADS}",
            f"all figures                             {folder / 'summary.json'}",
            "",
            f'try:  headstart generate {folder / HEADS} "Why is the sky blue?" --mark',
        ]
    )
