"""Heads adapted by LoRA (arXiv 2106.09685) to other texts or to another target: only low-rank factors are trained.

While they are trained the heads hold both, W and B·A beside it, under PEFT's names; their config says so (``lora``).
Afterwards :func:`merge` gives ordinary heads, and :func:`save_adapter` the factors alone::

    adapter/  adapter.json          the factors' settings, the heads' config, which heads they belong on (name and hash)
              adapter.safetensors   LAYER.lora_A.weight, LAYER.lora_B.weight
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from heads.base import DraftHeads
from heads.config import ConfigError, HeadsConfig, refuse_unknown
from heads.identity import TargetMismatch, hash_all
from heads.layout import CONFIG_BYTES, read_object

ADAPTER, FACTORS = "adapter.json", "adapter.safetensors"
DEFAULTS: dict[str, Any] = {"rank": 8, "alpha": 16.0, "modules": "all"}
FLOATS = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}
NAME = "default"  # what PEFT calls a model's first adapter


def lora_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Complete settings: ``rank`` and ``alpha`` (the factors' product is scaled by alpha/rank), and ``modules``, names
    of linear layers as PEFT's ``target_modules`` takes them, or "all".

    Raises:
        ConfigError: an unknown name, or a value that cannot be.
    """
    refuse_unknown(given, DEFAULTS, "lora")
    made = DEFAULTS | dict(given)
    if type(made["rank"]) is not int or made["rank"] < 1:
        raise ConfigError(f"lora.rank must be 1 or more, not {made['rank']!r:.80}")
    if not isinstance(made["alpha"], (int, float)) or not made["alpha"] > 0:
        raise ConfigError(f"lora.alpha must be above 0, not {made['alpha']!r:.80}")
    return made


def adapt(heads: DraftHeads, given: Mapping[str, Any]) -> None:
    """Put fresh factors on the heads' linear layers, in place, and freeze all else; their output stays as it was.

    Raises:
        ConfigError: see :func:`lora_settings`; no layer has such a name; they are adapted already, or an adapter
            themselves.
    """
    if heads.config.lora is not None:
        raise ConfigError("these heads have an adapter on them already: merge it first")
    _refuse_adapter(heads)
    heads.config = replace(heads.config, lora=lora_settings(given))
    inject(heads)


def _refuse_adapter(heads: DraftHeads) -> None:
    """Refuse heads whose own weights are low-rank factors: another adapter's could not be told from them."""
    if factors(heads):
        raise ConfigError(f"{heads.config.kind} heads are an adapter themselves: train them further without heads.lora")


def inject(heads: DraftHeads) -> None:
    """The factors that ``heads.config.lora`` asks for, B at zero."""
    from peft import LoraConfig, inject_adapter_in_model  # takes a second, which only adapted heads need

    assert heads.config.lora is not None
    _refuse_adapter(heads)
    settings = lora_settings(heads.config.lora)
    linear = [name for name, module in heads.named_modules() if isinstance(module, nn.Linear)]
    wanted = linear if settings["modules"] == "all" else settings["modules"]
    dtype = next(heads.parameters()).dtype
    try:
        config = LoraConfig(r=settings["rank"], lora_alpha=settings["alpha"], target_modules=wanted)
        inject_adapter_in_model(config, heads)
    except ValueError as error:
        raise ConfigError(
            f"lora.modules {str(settings['modules'])[:80]} does not fit; layers are {', '.join(linear)}"
        ) from error
    heads.to(dtype)


def factors(heads: DraftHeads) -> dict[str, Tensor]:
    """The trained tensors by name, without PEFT's name for the adapter."""
    held = heads.state_dict()
    return {name.replace(f".{NAME}.", "."): tensor for name, tensor in held.items() if ".lora_" in name}


def base_tensors(heads: DraftHeads) -> dict[str, Tensor]:
    """The tensors of the heads below the adapter, under ordinary names."""
    held = heads.state_dict()
    return {name.replace(".base_layer.", "."): tensor for name, tensor in held.items() if ".lora_" not in name}


@torch.no_grad()
def merge(heads: DraftHeads) -> DraftHeads:
    """Ordinary heads that say the same, within rounding, in eval mode; heads without an adapter are given back."""
    from heads.kinds import build

    if heads.config.lora is None:
        return heads
    tensors = base_tensors(heads)
    for name, module in heads.named_modules():
        if hasattr(module, "get_delta_weight"):
            weight = tensors[f"{name}.weight"]
            delta: Tensor = module.get_delta_weight(NAME)
            tensors[f"{name}.weight"] = weight + delta.to(weight)
    first = next(iter(heads.parameters()))
    plain = build(replace(heads.config, lora=None), heads.target, check=False).to(first.device, first.dtype)
    plain.load_state_dict(tensors)
    return plain.eval()


def save_adapter(heads: DraftHeads, folder: Path, base: str) -> None:
    """Write the factors, and which heads they belong on (``base``: their folder or Hub id).

    Raises:
        ConfigError: there is no adapter on them.
        OSError: the disk refused.
    """
    if heads.config.lora is None:
        raise ConfigError("these heads have no adapter to save")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in factors(heads).items()}
    record = {
        "base": str(Path(base).resolve()) if Path(base).is_dir() else base,
        "base_sha256": hash_all(base_tensors(heads).items()),
        "base_dtype": str(next(heads.parameters()).dtype).removeprefix("torch."),
        "heads": heads.config.to_dict(),
    }
    for name, write in (
        (FACTORS, lambda path: save_file(tensors, path, metadata={"format": "pt"})),
        (ADAPTER, lambda path: path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")),
    ):
        partial = folder / f".{name}.partial"
        try:
            write(partial)
            os.replace(partial, folder / name)
        except SafetensorError as error:  # how it tells of a full disk
            raise OSError(f"{folder / name} could not be written ({error})") from error
        finally:
            partial.unlink(missing_ok=True)


def load_adapter(
    folder: Path, target: Any = None, *, base: str | None = None, allow_mismatch: bool = False
) -> DraftHeads:
    """Heads with the adapter of ``folder`` on them, not merged.

    Args:
        target: the target they were adapted to; loaded by the adapter's record when None.
        base: where the heads are that it belongs on, if not where they were.

    Raises:
        HeadsFileError: files are missing or do not fit, or the base heads are other ones.
        TargetMismatch: another target than they were adapted to.
    """
    from heads.derived import recorded
    from heads.store import HeadsFileError, load, read_tensors
    from heads.target import Target

    try:
        record = read_object(folder / ADAPTER, CONFIG_BYTES, "adapter's record")
        config = HeadsConfig.from_dict(record["heads"], str(folder / ADAPTER))
        dtype, name, wanted = FLOATS[record["base_dtype"]], base or str(record["base"]), record["base_sha256"]
    except (KeyError, TypeError) as error:
        raise HeadsFileError(f"{folder / ADAPTER} is not an adapter's record ({error!r})") from None
    except ConfigError:
        raise
    except ValueError as error:
        raise HeadsFileError(f"{error}: it is not an adapter's record") from None
    if config.lora is None or Path(name).resolve() == folder.resolve():
        raise HeadsFileError(f"{folder / ADAPTER} names no {'heads to be put on' if config.lora else 'factors'}")
    if (Path(name) / ADAPTER).is_file():  # two could name each other
        raise HeadsFileError(f"{folder} belongs on {name}, which is an adapter too: merge that first")
    if target is None:
        target = recorded(config.target, None)
    elif not isinstance(target, Target):
        target = Target(target)
    target.check(config.target, allow_mismatch=allow_mismatch)
    heads = load(name, target, dtype=dtype, allow_mismatch=True)  # they may be of another target: that is why
    if hash_all(heads.state_dict().items()) != wanted:
        raise HeadsFileError(f"{name} are not the heads that {folder} was trained on: name those with --heads")
    heads.config = config
    inject(heads)
    held = factors(heads)
    tensors = read_tensors(folder / FACTORS, held)
    with torch.no_grad():
        for key, tensor in held.items():
            tensor.copy_(tensors[key])
    return heads.eval()


def start_from(path: str, target: Any, dtype: torch.dtype, *, allow_mismatch: bool) -> DraftHeads:
    """Existing heads to train further, as of ``target`` from now on.

    Raises:
        TargetMismatch: they are another target's, unless ``allow_mismatch``; says how to allow it in a recipe.
    """
    from heads.store import load

    try:
        heads = load(path, target, dtype=dtype, allow_mismatch=allow_mismatch)
    except TargetMismatch as error:
        hint = str(error).partition(". Load the target")[0]
        raise TargetMismatch(f"heads.init {path}: {hint}. To adapt them, set heads.allow_mismatch to true") from None
    heads.config = replace(heads.config, target=target.identity())
    return heads
