"""The table of kinds. A new kind is one file beside this one and one row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from heads.base import DraftHeads
from heads.block import Block
from heads.config import ConfigError, HeadsConfig, nearest, refuse_unknown
from heads.eagle import Eagle
from heads.eagle1 import Eagle1
from heads.hydra import Hydra
from heads.identity import TargetMismatch
from heads.layer import counted
from heads.medusa import Medusa
from heads.mtp import Mtp
from heads.target import Target

DEEPEST, LARGEST = 512, 1 << 24  # beyond any look-ahead, and any size that an option gives

KINDS: dict[str, type[DraftHeads]] = {
    "medusa": Medusa,
    "eagle": Eagle,
    "eagle1": Eagle1,
    "block": Block,
    "hydra": Hydra,
    "mtp": Mtp,
}


def kind_of(name: str) -> type[DraftHeads]:
    """The class of a kind.

    Raises:
        ConfigError: there is no such kind.
    """
    if name not in KINDS:
        raise ConfigError(f"unknown kind of heads {name!r}{nearest(name, KINDS)} (known: {', '.join(KINDS)})")
    return KINDS[name]


def make_config(
    kind: str,
    target: Target,
    *,
    lookahead: int | None = None,
    taps: tuple[int, ...] | None = None,
    draft_vocab_size: int | None = None,
    options: dict[str, Any] | None = None,
) -> HeadsConfig:
    """Complete settings of a kind for a target; what is not given is the kind's default.

    Raises:
        ConfigError: unknown kind or option, a look-ahead below 1, or a tap the target does not have.
    """
    cls, options = kind_of(kind), dict(options or {})
    known = cls.default_options(target)
    refuse_unknown(options, known, f"{kind} options")
    chosen = tuple(cls.default_taps(target) if taps is None else taps)
    wrong = [tap for tap in chosen if not 0 <= tap <= target.num_layers]
    if wrong or not chosen:
        raise ConfigError(f"taps {wrong or chosen} are not hidden states 0 to {target.num_layers} of {target.name}")
    depth = cls.default_lookahead if lookahead is None else lookahead
    if depth < 1:
        raise ConfigError(f"lookahead must be 1 or more, not {depth}")
    if draft_vocab_size is not None and not 0 < draft_vocab_size <= target.vocab_size:
        raise ConfigError(f"draft_vocab_size must be 1 to {target.vocab_size}, not {draft_vocab_size}")
    return HeadsConfig(
        kind=kind,
        lookahead=depth,
        taps=chosen,
        target=target.identity(),
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        options=counted(known | options),
    )


def build(config: HeadsConfig, target: Target, *, check: bool = True, device: str = "cpu") -> DraftHeads:
    """Heads of a config on a target, with fresh weights not yet initialized (see ``DraftHeads.initialize``).

    On the device ``"meta"`` they have names and shapes, and take no memory.

    Raises:
        ConfigError: an option of the kind is unknown or missing.
        TargetMismatch: the config was made for another target, or (``check`` or not) for one of another size.
        ValueError: the target's logits do not follow from its hidden state (``Target.self_check``).
    """
    cls, where = kind_of(config.kind), f"options of {config.kind} heads"
    known = cls.default_options(target)
    refuse_unknown(config.options, known, where)
    config = replace(config, options=cls.later_options | config.options)
    missing = [name for name in known if name not in config.options]
    if missing:
        raise ConfigError(f"{where} lack {', '.join(missing)}")
    _check_values(config, known, where)
    if check:
        target.check(config.target)
        target.self_check()
    for name in ("hidden_size", "vocab_size"):  # on these no weight fits: there is nothing to try all the same
        there, here = getattr(config, name), getattr(target, name)
        if there != here:
            raise TargetMismatch(
                f"these heads were made for {config.target.name}, not for {target.name}: "
                f"{name} {there} there, {here} here"
            )
    beyond = [tap for tap in config.taps if not 0 <= tap <= target.num_layers]
    if beyond:
        raise TargetMismatch(f"these heads read hidden states {beyond}, and {target.name} has 0 to {target.num_layers}")
    try:
        with torch.device(device):
            made = cls(config, target)
            if config.lora is not None:
                from heads.tuned import inject

                inject(made)
            return made
    except (RuntimeError, ArithmeticError, TypeError) as problem:  # torch's, for a size of 0 and the like
        raise ConfigError(f"{where} make no heads: {' '.join(str(problem).split())[:200]}") from None


def _check_values(config: HeadsConfig, known: dict[str, Any], where: str) -> None:
    """A stored config may come from anybody: its values are of the defaults' types, and of bounded size.

    Raises:
        ConfigError: names the first that is not.
    """
    if config.lookahead > DEEPEST:
        raise ConfigError(f"a look-ahead of {config.lookahead} is beyond any ({DEEPEST} at most)")
    for name, default in known.items():
        value = config.options[name]
        what, fits = next(
            (row for kind, row in _OPTIONS.items() if isinstance(default, kind)), ("", lambda value: True)
        )
        if not fits(value):
            raise ConfigError(f"{where}: {name} must be {what}, not {str(value)[:80]!r}")
    if (layers := config.options.get("layers", 0)) > DEEPEST // 8:
        raise ConfigError(f"{where}: {layers} layers are beyond any ({DEEPEST // 8} at most)")


# type of an option's default → what may stand there, in words and as a test; a truth value is no number here
_OPTIONS: dict[type, tuple[str, Callable[[Any], bool]]] = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: (f"a whole number from 0 to {LARGEST}", lambda value: type(value) is int and 0 <= value <= LARGEST),
    float: ("a number", lambda value: type(value) in (int, float) and abs(value) < 1e15),
    str: ("a text", lambda value: isinstance(value, str)),
}
