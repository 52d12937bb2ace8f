"""DSpark's form: DFlash's layers under a low-rank bias by the token before, perhaps a confidence.

Block heads have it where their slots draft the token behind them. The output matrix is the target's, which vLLM and
SGLang load, or one's own, for vLLM alone, perhaps beside the map of a reduced vocabulary. The engines' confidence has a
bias; heads here have none, which is a zero there.
"""

from __future__ import annotations

from typing import Any

import torch

from heads.base import DraftHeads
from heads.formats import dflash
from heads.formats.checkpoint import Checkpoint
from heads.formats.compare import EMBEDDING, check_embedding
from heads.formats.draft_map import from_offsets, to_offsets
from heads.formats.eagle_layer import check_taps
from heads.formats.format import (
    ENGINES,
    Choice,
    Files,
    Format,
    FormatError,
    Plan,
    Request,
    engine_of,
    only_kind,
    stored,
)
from heads.formats.settings import Settings
from heads.target import Target

NAME = "dspark"
MARKOV, CONFIDENCE, ZERO = "markov_head.markov_w1.weight", "confidence_head.proj.weight", "confidence_head.proj.bias"
FIXED: dict[str, tuple[Any, str]] = {"shifted": (True, "DSpark's slots draft the token behind them")}


def _names(layers: int, own_output: bool, confidence: bool) -> dict[str, str]:
    return {
        **dflash.names(layers),
        "markov.w1.weight": MARKOV,
        "markov.w2.weight": "markov_head.markov_w2.weight",
        **({"lm_head.weight": "lm_head.weight"} if own_output else {}),
        **({"confidence.proj.weight": CONFIDENCE} if confidence else {}),
    }


def write(heads: DraftHeads, request: Request) -> Files:
    """The folder.

    Raises:
        FormatError: other heads than block heads, or such as do what this form cannot hold.
    """
    only_kind(heads, "block", NAME, "its layers draft a block of masks in one pass, which these do not")
    engine_of(request, ENGINES, NAME)
    check_taps(heads)
    dflash.check_embedding_is_bare(heads)
    _check_logits_are_bare(heads)
    dflash.check_fixed(heads, FIXED, NAME)
    own, options = heads.config, heads.config.options
    if not options["markov_rank"]:
        raise FormatError(
            "block heads with markov_rank 0 have no dspark form: it is read with a bias of rank 1 or more"
        )
    if own.draft_vocab_size is not None and not options["own_output"]:
        raise FormatError(
            f"a draft vocabulary of {own.draft_vocab_size} over the target's output matrix has no dspark form: a "
            "reduced vocabulary comes with a matrix of its own there (own_output)"
        )
    if request.engine == "sglang" and options["own_output"]:
        raise FormatError(
            "SGLang's DSpark speaks through the target's output matrix and passes over one of the heads' own: train "
            "with heads.options.own_output false, or export for vllm"
        )
    ids = [tap - 1 for tap in own.taps]
    config = dflash.block_config(heads, request) | {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": own.lookahead,
        "mask_token_id": options["mask_token_id"],
        dflash.IDS: ids,
        "draft_vocab_size": own.draft_vocab_size or own.vocab_size,
        "markov_rank": options["markov_rank"],
        "markov_head_type": "vanilla",
        "enable_confidence_head": options["confidence"],
        "confidence_head_with_markov": options["confidence"],
        "dflash_config": {"mask_token_id": options["mask_token_id"], dflash.IDS: ids},
    }
    state = heads.state_dict()
    renamed = _names(options["layers"], options["own_output"], options["confidence"])
    held = {theirs: stored(state[ours], request.dtype) for ours, theirs in renamed.items()}
    if options["confidence"]:
        held[ZERO] = torch.zeros(1, dtype=request.dtype)
    if own.draft_vocab_size is not None:
        held |= to_offsets(heads.target_ids, own.vocab_size)
    return Files(config, "model.safetensors", held, ("vllm",) if options["own_output"] else ENGINES)


def _check_logits_are_bare(heads: DraftHeads) -> None:
    probe = torch.linspace(-9.0, 9.0, 7)
    if not torch.equal(heads.target.transform(probe), probe):
        raise FormatError(
            f"{heads.target.name} caps or scales its logits, and so do block heads before they add their bias; the "
            "engines' dspark adds it to bare ones"
        )


def recognises(checkpoint: Checkpoint) -> bool:
    """DFlash's tensors with a bias by the token before."""
    return dflash.recognises(checkpoint) and MARKOV in checkpoint.entries


def read(checkpoint: Checkpoint, target: Target, choice: Choice) -> Plan:
    """The plan of a DSpark checkpoint; a look-ahead may be shorter than its block, not longer.

    Raises:
        FormatError: it is for a target of another size, or does what block heads do not.
    """
    settings = Settings.of(checkpoint.config, checkpoint.path)
    inner = settings.part("dflash_config")
    dflash.refuse(settings, inner, target)
    if settings.flag("dspark_bonus_anchor", False) or not settings.flag("sample_from_anchor", True):
        raise FormatError(f"{settings.where}: the root's slot drafts nothing, which block heads with a bias cannot do")
    if (kind := settings.text("markov_head_type", "vanilla")) != "vanilla":
        raise FormatError(f"{settings.where}: markov_head_type is {kind!r}, only 'vanilla' can be imported")
    slots = settings.whole("block_size")
    lookahead = choice.lookahead or slots
    if lookahead > slots:
        raise FormatError(f"{settings.where}: a block_size of {slots} drafts 1 to {slots} tokens, not {lookahead}")
    place = settings if dflash.IDS in settings else inner
    check_embedding(checkpoint, target)
    held, layers = checkpoint.entries, dflash.layer_count(checkpoint)
    own, confidence = "lm_head.weight" in held, CONFIDENCE in held
    reduced = None
    if own:
        reduced = from_offsets(checkpoint, settings, checkpoint.shape("lm_head.weight", 2)[0], target.vocab_size)
    if ZERO in held and bool(checkpoint.load(ZERO).any()):
        raise FormatError(f"{checkpoint.path}: {ZERO} is not zero, and the confidence of block heads has no bias")
    return Plan(
        kind="block",
        lookahead=lookahead,
        taps=dflash.layer_taps(place, target),
        options=dflash.layer_options(checkpoint, settings)
        | {
            "shifted": True,
            "mask_token_id": place.count("mask_token_id"),
            "markov_rank": checkpoint.shape(MARKOV, 2)[1],
            "own_output": own,
            "confidence": confidence,
        },
        names=_names(layers, own, confidence),
        also=frozenset({EMBEDDING, ZERO, "d2t", "t2d"} & held.keys()),
        target_ids=None if reduced is None or len(reduced[0]) == target.vocab_size else reduced[0],
        order={} if reduced is None else dict.fromkeys(("lm_head.weight", "markov.w2.weight"), reduced[1]),
    )


FORMAT = Format(
    "DSpark's block heads for vLLM, and with the target's output matrix for SGLang", write, recognises, read
)
