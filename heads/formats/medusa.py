"""Medusa heads, in the Medusa project's form and in vLLM's (up to 0.32): residual blocks and output matrices.

The project's form has no map of a reduced vocabulary and may leave the output matrices out (the target's is used);
vLLM's has both a map, ``token_map`` of target ids, and a matrix a head, or as ``original_lm_head`` one for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heads.base import DraftHeads
from heads.formats.checkpoint import Checkpoint
from heads.formats.compare import differing_rows
from heads.formats.format import FLOATS, Choice, Files, Format, FormatError, Plan, Request, engine_of, only_kind, stored
from heads.formats.settings import Settings
from heads.target import Target

NAME, MAP = "medusa", "token_map"
REDUCED = (
    "vLLM 0.32.0 was seen to refuse every Medusa checkpoint with a reduced vocabulary, which earlier versions read: "
    "for it train heads over the whole vocabulary (draft_vocab_size: null)"
)
INTEGERS = (torch.int64, torch.int32)


@dataclass(frozen=True)
class Layout:
    """Where block ``layer`` of head ``k`` stands, and head ``k``'s output matrix behind its ``layers`` blocks."""

    block: Callable[[int, int], str]
    output: Callable[[int, int], str]


PROJECT = Layout(lambda k, layer: f"{k}.{layer}.linear", lambda k, layers: f"{k}.{layers}.weight")
VLLM = Layout(lambda k, layer: f"blocks.{k}.layers.{layer}", lambda k, layers: f"lm_heads.{k}.weight")


def write(heads: DraftHeads, request: Request) -> Files:
    """The Medusa project's folder, or with the engine vllm the one that vLLM up to 0.32 loads.

    Raises:
        FormatError: other heads than Medusa's, another tap than the last state, or a vocabulary without a map.
    """
    only_kind(heads, "medusa", NAME, "its heads are independent blocks on the last hidden state, which these are not")
    engine_of(request, ["vllm"], NAME)
    if heads.config.taps != (heads.target.num_layers,):
        raise FormatError(
            f"taps {list(heads.config.taps)} have no Medusa form: its heads read the last state, "
            f"{heads.target.num_layers} of {heads.target.name}"
        )
    return _for_vllm(heads, request) if request.engine else _for_project(heads, request)


def _for_project(heads: DraftHeads, request: Request) -> Files:
    own = heads.config
    if own.draft_vocab_size is not None:
        raise FormatError(
            f"a draft vocabulary of {own.draft_vocab_size} has no place in the Medusa project's form, which has no "
            "map: export with --engine vllm, whose form has one"
        )
    config = {
        "medusa_num_heads": own.lookahead,
        "medusa_num_layers": own.options["layers"],
        "base_model_name_or_path": request.target_name,
        "version": "2",
    }
    state = heads.state_dict()
    found = {theirs: stored(state[ours], request.dtype) for ours, theirs in _names(heads, PROJECT).items()}
    return Files(config, "medusa_lm_head.safetensors", found, ())


def _for_vllm(heads: DraftHeads, request: Request) -> Files:
    own, output, state = heads.config, heads.target.output, heads.state_dict()
    found = {theirs: stored(state[ours], request.dtype) for ours, theirs in _names(heads, VLLM).items()}
    if not own.options["own_output"]:  # this form has no other way to say that they share the target's
        if type(output) is not nn.Linear or getattr(output, "bias", None) is not None:
            raise FormatError(f"the output of {heads.target.name} is more than a matrix, which this form cannot hold")
        rows = output.weight if heads.draft_ids is None else output.weight[heads.draft_ids]
        found |= {VLLM.output(k, 0): stored(rows, request.dtype) for k in range(own.lookahead)}
    if own.draft_vocab_size is not None:
        found[MAP] = heads.target_ids.detach().cpu().clone()
    config: dict[str, Any] = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": own.hidden_size,
        "vocab_size": own.vocab_size,
        "num_heads": own.lookahead,
        "num_hidden_layers": own.options["layers"],
        "truncated_vocab_size": own.draft_vocab_size or own.vocab_size,
        "medusa_fc_bias": True,
        "original_lm_head": False,
    }
    return Files(config, "model.safetensors", found, ("vllm",), () if own.draft_vocab_size is None else (REDUCED,))


def _names(heads: DraftHeads, layout: Layout) -> dict[str, str]:
    options = heads.config.options
    return _blocks(layout, heads.config.lookahead, options["layers"], ("weight", "bias")) | (
        _outputs(layout, heads.config.lookahead, options["layers"]) if options["own_output"] else {}
    )


def _blocks(layout: Layout, count: int, layers: int, parts: tuple[str, ...]) -> dict[str, str]:
    return {
        f"blocks.{k}.{layer}.linear.{part}": f"{layout.block(k, layer)}.{part}"
        for k in range(count)
        for layer in range(layers)
        for part in parts
    }


def _outputs(layout: Layout, count: int, layers: int) -> dict[str, str]:
    return {f"outputs.{k}.weight": layout.output(k, layers) for k in range(count)}


def recognises(checkpoint: Checkpoint) -> bool:
    """A first block of a first head."""
    return any(f"{layout.block(0, 0)}.weight" in checkpoint.entries for layout in (PROJECT, VLLM))


def read(checkpoint: Checkpoint, target: Target, choice: Choice) -> Plan:
    """The plan of either form; heads and layers are counted in the tensors, whatever the config says.

    Raises:
        FormatError: a look-ahead is asked for that is not the number of heads, or the map of a reduced vocabulary is
            missing or wrong.
    """
    held = checkpoint.entries
    layout = VLLM if f"{VLLM.block(0, 0)}.weight" in held else PROJECT
    count = next(k for k in range(len(held) + 1) if f"{layout.block(k, 0)}.weight" not in held)
    layers = next(layer for layer in range(len(held) + 1) if f"{layout.block(0, layer)}.weight" not in held)
    if choice.lookahead not in (None, count):
        raise FormatError(
            f"{checkpoint.path} has {count} Medusa heads: a look-ahead of {choice.lookahead} is not theirs"
        )
    outputs = _outputs(layout, count, layers)
    if layout is VLLM and Settings.of(checkpoint.config, checkpoint.path).flag("original_lm_head", False):
        outputs = dict.fromkeys(outputs, layout.output(0, layers))  # one for all heads
    own = any(theirs in held for theirs in outputs.values())
    ids, order = _map(checkpoint, target, outputs["outputs.0.weight"]) if own else (None, None)
    also = {MAP} & held.keys()
    if own and all(_is_targets(checkpoint, name, target, order, ids) for name in outputs.values()):
        own, also = False, also | set(outputs.values())
    # vLLM's form may do without biases; blocks here have them
    biased = any(f"{layout.block(k, 0)}.bias" in held for k in range(count)) or layout is PROJECT
    blank = {} if biased else _blocks(layout, count, layers, ("bias",))
    return Plan(
        kind="medusa",
        lookahead=count,
        taps=(target.num_layers,),
        options={"layers": layers, "own_output": own},
        names=_blocks(layout, count, layers, ("weight", "bias") if biased else ("weight",)) | (outputs if own else {}),
        also=frozenset(also),
        target_ids=ids,
        order={} if order is None else dict.fromkeys(outputs, order),
        zeros=frozenset(blank),
    )


def _map(checkpoint: Checkpoint, target: Target, output: str) -> tuple[Tensor | None, Tensor | None]:
    """Sorted target ids of a reduced vocabulary, and which rows of the output matrices are theirs."""
    rows, path = checkpoint.shape(output, 2)[0], checkpoint.path
    entry = checkpoint.entries.get(MAP)
    if entry is None:
        if rows != target.vocab_size:
            raise FormatError(
                f"{path}: {output} has {rows} rows where {target.name} has {target.vocab_size} tokens, and there is no "
                f"{MAP} that says which they are"
            )
        return None, None
    if entry.dtype not in INTEGERS or len(entry.shape) != 1 or rows not in (entry.shape[0], target.vocab_size):
        raise FormatError(f"{path}: {MAP} is {entry.dtype} {entry.shape} beside an output matrix of {rows} rows")
    stored_ids = checkpoint.load(MAP).long()
    order = stored_ids.argsort()
    ids = stored_ids[order]
    if int(ids[0]) < 0 or int(ids[-1]) >= target.vocab_size or bool((ids[1:] == ids[:-1]).any()):
        raise FormatError(f"{path}: {MAP} must hold distinct tokens below {target.vocab_size}")
    if len(ids) == target.vocab_size:
        return None, order if rows == len(ids) else None
    return ids, order if rows == len(ids) else ids  # matrices of all rows are cut down by the map


def _is_targets(checkpoint: Checkpoint, name: str, target: Target, order: Tensor | None, ids: Tensor | None) -> bool:
    """Whether an output matrix is nothing but the target's rows, as far as its dtype tells."""
    own = target.output.weight
    own = own if ids is None else own[ids.to(own.device)]
    entry = checkpoint.entries.get(name)
    if entry is None or entry.dtype not in FLOATS or len(entry.shape) != 2 or entry.shape[1] != own.shape[1]:
        return False
    value = checkpoint.load(name)
    value = value if order is None or int(order.max()) >= value.shape[0] else value[order]
    return value.shape == own.shape and differing_rows(value, own) == 0


FORMAT = Format("Medusa heads (the Medusa project's; with --engine vllm, vLLM's up to 0.32)", write, recognises, read)
