"""Other weights to begin with than a kind's own, for measuring what its own are worth; written as heads to train on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from heads.base import DraftHeads
from heads.kinds import build
from heads.target import Target
from train.assemble import make_heads
from train.config import RunConfig
from train.conversations import Conversations
from train.progress import Reporter


def _random(heads: DraftHeads) -> None:
    """As torch makes the modules: nothing of the target."""


def _target_norm(heads: DraftHeads) -> None:
    """The target's rows under its own final norm, so that its last state would be read out as it reads it."""
    heads.initialize()
    final = next(module for module in reversed(list(heads.target.model.modules())) if "Norm" in type(module).__name__)
    heads.get_submodule("norm").get_parameter("weight").data.copy_(final.get_parameter("weight"))


def _target_layer(heads: DraftHeads) -> None:
    """The target's last layer in the heads' own, its norms folded in; what reads the token's embedding stays random.

    Raises:
        ValueError: the two are not built alike.
    """
    heads.initialize()
    width, theirs = heads.config.hidden_size, heads.target.layers[-1]
    at = {
        **{f"self_attn.{name}_proj": "input_layernorm" for name in "qkv"},
        **{f"mlp.{name}_proj": "post_attention_layernorm" for name in ("gate", "up")},
        "self_attn.o_proj": "",
        "mlp.down_proj": "",
    }
    try:
        for name, norm in at.items():
            weight = theirs.get_submodule(name).get_parameter("weight").float()
            if norm:
                weight = weight * theirs.get_submodule(norm).get_parameter("weight").float()
            own = heads.get_submodule(f"layer.{name.partition('.')[2]}").get_parameter("weight")
            own.data[:, own.shape[1] - width if norm else 0 :].copy_(weight)
    except (AttributeError, RuntimeError) as error:
        raise ValueError(f"{heads.config.kind} heads cannot start as a layer of {heads.target.name}: {error}") from None


STARTS: dict[str, Callable[[DraftHeads], None]] = {
    "random": _random,
    "target_norm": _target_norm,
    "target_layer": _target_layer,
}


def written(name: str, config: RunConfig, target: Target, texts: Conversations, folder: Path) -> Path:
    """Heads of a recipe with these first weights, in ``folder``, for ``heads.init``; what is there is taken.

    Raises:
        ValueError: the recipe asks for what cannot be.
    """
    if (folder / "config.json").is_file():
        return folder
    own = make_heads(config, target, texts, Reporter(False))
    torch.manual_seed(config.train.seed)
    heads = build(own.config, target)
    if own.draft_ids is not None:
        heads.set_draft_vocabulary(own.draft_ids.cpu())
    STARTS[name](heads)
    heads.save_pretrained(folder)
    return folder
