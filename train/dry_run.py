"""A run that is not run: its settings, sizes and steps, and what it will need of memory and disk.

The target is loaded and files of conversations are prepared (into a folder that is removed again), since steps, states
and memory follow from them; nothing is written to the run folder or to the cache. A target may also be a configuration
alone (:mod:`train.outline`): then sizes are what they would be on an accelerator, and nothing is loaded.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from heads.base import DraftHeads
from heads.inside import DraftsInside
from train.assemble import cache_folder, find_recipe, load_conversations, make_heads
from train.cache import CacheSpec
from train.config import RunConfig
from train.conversations import Conversations
from train.estimate import size
from train.evaluation import evaluated
from train.launch import start
from train.loop import total_steps
from train.memory_needs import MemoryNeeds
from train.needs import DiskNeeds, StepPlan, plan_steps
from train.outline import META, SizesOnly, is_outline, outline
from train.progress import Reporter
from train.ranks import Ranks
from train.settings import load, parse, to_dict, to_yaml
from train.targets import load_target
from train.trackers import check_tracker, without_secrets
from train.work import PassWork, of_run


def dry_run(arguments: Sequence[str] = ()) -> tuple[dict[str, Any], str]:
    """What training with these ``arguments`` would be, for JSON and for people.

    Raises:
        ValueError, OSError: as training would, before its first step.
    """
    recipe, overrides = parse(arguments)
    config = load(find_recipe(recipe), overrides)
    check_tracker(config)
    accelerator = start(config)
    ranks, silent = Ranks(accelerator), Reporter(False)
    alone = is_outline(config.target.name)
    memory = MemoryNeeds(accelerator, config, META if alone else None)
    with _scratch(ranks) as scratch, SizesOnly() if alone else nullcontext():
        target = outline(config.target) if alone else load_target(config, accelerator)
        elsewhere = replace(config, output=replace(config.output, folder=str(scratch)))
        conversations = load_conversations(elsewhere, "train", target, ranks, silent)
        heldout = None
        if config.eval.conversations or config.eval.prompts:
            heldout = evaluated(load_conversations(elsewhere, "heldout", target, ranks, silent), config.eval)
        prepared = sum(path.stat().st_size for path in scratch.rglob("*") if path.is_file())
        with META if alone else nullcontext():
            heads = make_heads(config, target, conversations, silent)
        if alone and isinstance(heads, DraftsInside):
            raise ValueError(
                f"{config.heads.kind} heads are trained inside the target, which {config.target.name} is not"
            )
        plan = plan_steps(config, conversations, ranks.count)
        total = total_steps(config.train, conversations.lengths)
        needs = memory.of(heads, plan, conversations)
        share = conversations.answer_tokens / int(conversations.lengths.sum())
        passes = PassWork(memory.training_pass(heads, share)), PassWork(memory.states_pass(heads, share))
        disk = DiskNeeds.of(config, heads, _caches(config, heads, conversations, heldout), prepared)
        report = {
            "settings": without_secrets(to_dict(config)),
            "target": {"name": target.name, "parameters": sum(p.numel() for p in target.model.parameters())},
            "heads": {
                "kind": heads.config.kind,
                "lookahead": heads.config.lookahead,
                "taps": list(heads.config.taps),
                "draft_vocab_size": heads.config.draft_vocab_size,
                "trained": sum(p.numel() for p in heads.parameters() if p.requires_grad),
                "frozen": sum(p.numel() for p in heads.parameters() if not p.requires_grad),
            },
            "data": {
                "conversations": len(conversations),
                "tokens": int(conversations.lengths.sum()),
                "answer_tokens": conversations.answer_tokens,
                "heldout": len(heldout) if heldout is not None else 0,
            },
            "steps": {"total": total, "processes": ranks.count, **plan.to_dict(total)},
            "memory": needs,
            "disk": disk.to_dict(),
            "work": of_run(config, conversations, plan, total, *passes),
        }
    return report, _text(config, report, plan, total)


@contextmanager
def _scratch(ranks: Ranks) -> Iterator[Path]:
    folder = Path(ranks.share(tempfile.mkdtemp(prefix="headstart-dry-") if ranks.main else ""))
    try:
        yield folder
    finally:
        if ranks.main:
            shutil.rmtree(folder, ignore_errors=True)


def _caches(
    config: RunConfig, heads: DraftHeads, conversations: Conversations, heldout: Conversations | None
) -> list[tuple[str, CacheSpec, Path]]:
    """Name, content and place of each cache of states that the run reads."""
    if config.data.features != "cached":
        return []
    dtype, root = getattr(torch, config.data.feature_dtype), cache_folder(config)
    sets = {"train": conversations} | ({"heldout": heldout} if heldout is not None else {})
    specs = {
        name: CacheSpec(heads.target, each, tuple(heads.config.taps), dtype, config.train.kernels)
        for name, each in sets.items()
    }
    return [(name, spec, spec.folder(root)) for name, spec in specs.items()]


def _text(config: RunConfig, report: dict[str, Any], plan: StepPlan, total: int) -> str:
    heads, data, memory, disk = report["heads"], report["data"], report["memory"], report["disk"]
    vocabulary = f", draft vocabulary {heads['draft_vocab_size']}" if heads["draft_vocab_size"] else ""
    frozen = f", {heads['frozen']:,} frozen" if heads["frozen"] else ""
    return "\n".join(
        [
            "effective settings",
            *(f"  {line}" for line in to_yaml(config).splitlines()),
            "",
            f"target   {report['target']['name']}: {report['target']['parameters']:,} parameters",
            f"heads    {heads['kind']}, look-ahead {heads['lookahead']}, taps {heads['taps']}{vocabulary}: "
            f"{heads['trained']:,} trained parameters{frozen}",
            f"data     {data['conversations']:,} conversations, {data['tokens']:,} tokens, "
            f"{data['answer_tokens']:,} of answers; {data['heldout']:,} held out",
            f"steps    {plan.line(total, report['steps']['processes'])}",
            "",
            f"memory   {size(memory['total'])} for each process at most, where "
            + (f"{size(memory['available'])} are free" if memory["available"] else "what is free cannot be told"),
            *(f"  {size(value):>12}  {name}" for name, value in memory["parts"].items()),
            "",
            f"disk     {size(disk['total'])} to be written",
            *(f"  {size(value):>12}  {name}" for name, value in disk["parts"].items()),
            "",
            *_work(report["work"]),
        ]
    )


def _work(work: dict[str, Any]) -> list[str]:
    hours = ", ".join(f"{hours:,.2g} at {rate}" for rate, hours in work["gpu_hours"].items())
    return [
        f"work     {work['total']:.2e} floating-point operations, {work['tokens_trained']:,.0f} tokens trained; "
        f"hours of one GPU: {hours}",
        f"  {work['heads']:12.2e}  heads, {work['heads_per_token'] / 1e9:,.2f}e9 a token trained",
        f"  {work['target']:12.2e}  the target's states, {work['target_per_token'] / 1e9:,.2f}e9 a token",
    ]
