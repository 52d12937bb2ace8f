"""From settings to the parts of a run: target, conversations, heads, states."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

import data
from data.prepare import prepare
from heads.base import DraftHeads
from heads.embedded import cache_root
from heads.inside import DraftsInside
from heads.kinds import build, make_config
from heads.target import Target
from heads.vocabulary import by_frequency, coverage, size_for
from train.cache import open_or_build
from train.cache_spec import CacheSpec
from train.config import RunConfig
from train.conversations import Conversations
from train.existing import existing_heads
from train.features import FeatureSource, OnlineFeatures
from train.packing import Packed, PackedOnline
from train.pool import Pool
from train.progress import Reporter
from train.ranks import Ranks
from train.settings import SettingsError

BUILTIN = {
    "builtin:train": Path(str(data.__file__)).parent / "sample" / "train.jsonl.gz",
    "builtin:heldout": Path(str(data.__file__)).parent / "sample" / "heldout.jsonl.gz",
}


def load_conversations(config: RunConfig, part: str, target: Target, ranks: Ranks, reporter: Reporter) -> Conversations:
    """The conversations of ``part`` ("train" or "heldout"); files are prepared into the run folder first.

    Raises:
        FileNotFoundError: there is neither a file nor a prepared folder of that name.
        ValueError: nothing usable in it, a folder among files, or fewer conversations than processes.
    """
    named = getattr(config.data, part)
    sources = [BUILTIN.get(name.strip(), Path(name.strip())) for name in named.split(" + ")]
    for source in sources:
        if not source.exists():
            raise FileNotFoundError(
                f"data.{part} is {named}, and {source} does not exist: name a file of conversations (several: A + B), "
                f"a folder of `headstart data prepare`, or builtin:{part}"
            )
    if len(sources) > 1 and any(source.is_dir() for source in sources):
        raise ValueError(f"data.{part} is {named}: files are joined by +, a prepared folder stands alone")
    split, source = "train", sources[0]
    if source.is_file():
        folder = Path(config.output.folder) / "prepared" / part
        if ranks.main:
            report = prepare(sources, target.tokenizer(), folder, max_length=config.data.max_length)
            dropped = f", {sum(report.dropped.values())} dropped" if report.dropped else ""
            names = " + ".join(source.name for source in sources)
            reporter.say(f"data: {names} has {report.kept['train']} conversations{dropped} → {folder}")
        ranks.wait()
    else:
        folder = source
        split = part if (folder / part).is_dir() else "train"
    conversations = Conversations.load(folder, split)
    if len(conversations) < ranks.count:
        raise ValueError(
            f"data.{part} has {len(conversations)} conversations for {ranks.count} processes: "
            "use fewer processes or more data"
        )
    return conversations


def make_heads(config: RunConfig, target: Target, conversations: Conversations, reporter: Reporter) -> DraftHeads:
    """Heads to train, fresh or those of ``heads.init``, in float32 (float64 on a float64 target), the same on every
    process.

    Raises:
        ValueError: settings that do not go together, or that the kind or the target refuses.
    """
    dtype = torch.promote_types(target.dtype, torch.float32)
    torch.manual_seed(config.train.seed)
    if config.heads.init:
        heads = existing_heads(config, target, dtype)
    else:
        heads = _fresh(config, target, conversations, reporter)
    heads.to(device=target.device, dtype=dtype)
    settings = heads.config
    trained = sum(p.numel() for p in heads.parameters() if p.requires_grad)
    reporter.say(
        f"heads: {settings.kind}, look-ahead {settings.lookahead}, taps {list(settings.taps)}, "
        f"{trained / 1e6:.2f}M trained parameters, for {target.name}"
    )
    return heads


def _fresh(config: RunConfig, target: Target, conversations: Conversations, reporter: Reporter) -> DraftHeads:
    section = config.heads
    if section.lora:
        raise SettingsError("heads.lora needs heads.init: low-rank factors are trained on heads that there are")
    size, counts = chosen_size(config, target, conversations)
    settings = make_config(
        section.kind,
        target,
        lookahead=section.lookahead,
        taps=section.taps,
        draft_vocab_size=size,
        options=dict(section.options),
    )
    heads = build(settings, target)
    if size is not None and counts is not None:
        ids = by_frequency(counts, size)
        heads.set_draft_vocabulary(ids)
        share = 100 * coverage(counts, ids)
        reporter.say(
            f"heads: draft vocabulary of {size} covers {share:.1f}% of the answer tokens; "
            f"{100 - share:.1f}% can never be drafted"
        )
    heads.initialize()
    return heads


def chosen_size(config: RunConfig, target: Target, conversations: Conversations) -> tuple[int | None, Tensor | None]:
    """Size of the draft vocabulary, None for the target's own, and (V,) the counts that it is chosen by."""
    size, share = config.heads.draft_vocab_size, config.heads.draft_vocab_coverage
    if size is not None and share is not None:
        raise ValueError(
            f"heads.draft_vocab_size is {size} and heads.draft_vocab_coverage {share}: name one, the other follows"
        )
    if size is None and share is None:
        return None, None
    counts = conversations.answer_counts(target.vocab_size)
    return (size if share is None else size_for(counts, share)), counts


def make_features(
    config: RunConfig,
    heads: DraftHeads,
    conversations: Conversations,
    ranks: Ranks,
    reporter: Reporter,
    pool: Pool | None = None,
) -> FeatureSource:
    """States of the target for these conversations, as ``data.features`` says.

    Heads that run inside the target need its layers beside its states, so theirs are online where it says cached.

    Raises:
        ValueError: states of workers are wanted and there is no ``pool`` of them, or they are of no use to these heads.
    """
    target, dtype = heads.target, getattr(torch, config.data.feature_dtype)
    taps = tuple(heads.config.taps)
    inside, kind = isinstance(heads, DraftsInside), heads.config.kind
    if inside and config.data.features == "workers":
        raise ValueError(f"data.features is workers, and {kind} heads are trained inside the target: set it to online")
    if inside and config.target.placement != "outside":
        raise ValueError(f"{kind} heads are trained inside a target that is whole: set target.placement to outside")
    if inside and config.data.features == "cached":
        reporter.say(f"states: computed each step, since {kind} heads are trained inside the target")
    if config.data.features == "workers":
        if pool is None:
            raise ValueError("data.features is workers, which only train_heads.py starts: set it to cached or online")
        source = pool.source(conversations)
        return Packed(source) if config.train.packing else source
    if inside or config.data.features == "online":
        made = PackedOnline if config.train.packing else OnlineFeatures
        return made(target, conversations, taps, dtype)
    root = cache_folder(config)
    spec = CacheSpec(target, conversations, taps, dtype, config.train.kernels)
    with reporter.bar("states", max(1, int(conversations.lengths.sum()) // ranks.count), "tokens") as bar:
        cached = open_or_build(spec, root, ranks, lambda done, total: bar.update(done), reporter.say)
    return Packed(cached) if config.train.packing else cached


def cache_folder(config: RunConfig) -> Path:
    """Where caches of states lie."""
    return Path(config.data.cache_folder) if config.data.cache_folder else cache_root() / "features"


def find_recipe(name: str | os.PathLike[str]) -> Path:
    """The YAML a user means: a path as it stands, else one under the project's own configs/.

    Raises:
        FileNotFoundError: neither exists; lists the recipes there are.
    """
    asked = Path(name)
    if asked.is_file():
        return asked
    here = Path(__file__).resolve().parent
    for folder in (here.parent / "configs", here / "configs"):  # a checkout, an installation
        for candidate in (folder / asked.name, folder / f"{asked.name}.yaml"):
            if str(asked.parent) in (".", "configs") and candidate.is_file():
                return candidate
    known = sorted(
        {path.name for path in (here.parent / "configs").glob("*.yaml")} | {p.name for p in here.glob("configs/*.yaml")}
    )
    raise FileNotFoundError(f"no recipe {name}; there are configs/{', configs/'.join(known)}")
