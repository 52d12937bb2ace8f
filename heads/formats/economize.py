"""EAGLE-3 as the package ``economize`` saves what it trained; it reads the flat form itself, so ours go there by that.

A folder of ``economize_config.json``, which lists techniques with their settings, and ``economize_model.safetensors``,
whose tensors are named ``TECHNIQUE.PARAMETER``. A setting that is null means the target's own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

from heads.base import DraftHeads
from heads.eagle import Eagle
from heads.formats.checkpoint import Checkpoint
from heads.formats.eagle_layer import plan, theta
from heads.formats.format import Choice, Format, FormatError, Plan, Request, listed
from heads.formats.settings import Settings
from heads.target import Target

NAME, TECHNIQUE = "economize", "eagle3"
# their setting → what it is called in the flat form's config.json
SAME = {
    "draft_vocab": "draft_vocab_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "attention_bias": "attention_bias",
    "rope_scaling": "rope_scaling",
    "norm_before_residual": "norm_before_residual",
}


def write(heads: DraftHeads, request: Request) -> NoReturn:
    """Refuse."""
    raise FormatError("economize reads the eagle3 form: export to that")


def recognises(checkpoint: Checkpoint) -> bool:
    """Its config says so."""
    return "economize_version" in checkpoint.config


def read(checkpoint: Checkpoint, target: Target, choice: Choice) -> Plan:
    """The plan of a checkpoint with EAGLE-3 heads.

    Raises:
        FormatError: other techniques, the target's output matrix instead of an own one, rotary positions that are
            stretched or on part of a head; and see :func:`heads.formats.eagle_layer.plan`.
    """
    own = _settings(checkpoint)
    if (head := own.text("head", "own")) != "own":
        raise FormatError(f"{own.where}: head is {head!r}: only heads with an output matrix of their own are imported")
    if own.flag("zero_source_first", False):
        raise FormatError(f"{own.where}: zero_source_first is true, and the first token has no entry of its own here")
    if own.number("partial_rotary_factor", 1.0) != 1.0:
        raise FormatError(f"{own.where}: partial_rotary_factor is not 1, and heads rotate whole here")
    if strange := [name for name in checkpoint.entries if not name.startswith(f"{TECHNIQUE}.")]:
        raise FormatError(f"{checkpoint.path} has tensors of no technique that its config names: {listed(strange)}")
    renamed = {_flat(name): name for name in checkpoint.entries}
    flat = replace(
        checkpoint,
        entries={new: checkpoint.entries[old] for new, old in renamed.items()},
        load=lambda name: checkpoint.load(renamed[name]),
    )
    settings = Settings(_translated(own, target), own.where)
    taps = own.integers("aux_layers") or Eagle.default_taps(target)
    lookahead = choice.lookahead or own.whole("train_steps", 7)
    found = plan(flat, target, settings, settings, taps, lookahead)
    return replace(
        found,
        names={ours: _own(theirs) for ours, theirs in found.names.items()},
        also=frozenset(_own(theirs) for theirs in found.also),
    )


def _settings(checkpoint: Checkpoint) -> Settings:
    """The settings of the one technique there is.

    Raises:
        FormatError: there are others, or it is another.
    """
    told = checkpoint.config.get("techniques")
    where = f"the economize_config.json of {checkpoint.path}"
    if not isinstance(told, list) or not all(isinstance(one, dict) for one in told):
        raise FormatError(f"{where}: techniques must be a list of objects")
    names = [str(one.get("technique"))[:40] for one in told]
    if names != [TECHNIQUE]:
        raise FormatError(f"{where} has the techniques {names}: only {TECHNIQUE!r} alone can be imported")
    return Settings(told[0], where).part("config")


def _flat(name: str) -> str:
    """Their name of a tensor as the flat form has it."""
    inner = name.removeprefix(f"{TECHNIQUE}.")
    return f"midlayer.{inner.removeprefix('layer.')}" if inner.startswith("layer.") else inner


def _own(name: str) -> str:
    """The other way round."""
    return f"{TECHNIQUE}.{name.replace('midlayer.', 'layer.')}"


def _translated(own: Settings, target: Target) -> dict[str, Any]:
    """Their settings under the flat form's names, the target's where they are null."""
    found = {theirs: own.values.get(name) for name, theirs in SAME.items()}
    config = Settings(target.config.to_dict(), f"the config of {target.name}")
    if found["head_dim"] is None:
        width = target.hidden_size // target.config.num_attention_heads
        found["head_dim"] = getattr(target.config, "head_dim", None) or width
    return found | {
        "rope_theta": own.number("rope_theta", None) if "rope_theta" in own else theta(config, 10000.0),
        "rms_norm_eps": own.number("rms_norm_eps", config.number("rms_norm_eps", 1e-6)),
    }


FORMAT = Format("EAGLE-3 as economize stores it (import only)", write, recognises, read)
