"""``HeadsConfig``: what a heads folder's config.json says, read strictly."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from heads.identity import TargetIdentity

FORMAT_VERSION = 1
TAPS_INDEX = "hidden_states"
LATER = ("taps_index", "lora")  # keys that older records lack


class ConfigError(ValueError):
    """A configuration that cannot be used as it stands."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The text " — did you mean 'x'?" for a misspelt name, or nothing when no known name is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" — did you mean {close[0]!r}?" if close else ""


def refuse_unknown(found: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise for the first key that is not known.

    Raises:
        ConfigError: names the key, the place and the nearest known key.
    """
    known = list(known)
    for key in found:
        if key not in known:
            raise ConfigError(f"{where} has the unknown key {key!r}{nearest(key, known)} (known: {', '.join(known)})")


def _positive(value: Any) -> bool:
    return type(value) is int and value > 0  # a bool is no number here


# stored key → whether a value fits, and what fits in words
_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "kind": (lambda value: isinstance(value, str), "a name"),
    "lookahead": (_positive, "a positive integer"),
    "taps": (lambda value: isinstance(value, list) and all(type(tap) is int for tap in value), "a list of integers"),
    "target": (lambda value: isinstance(value, dict), "an object"),
    "hidden_size": (_positive, "a positive integer"),
    "vocab_size": (_positive, "a positive integer"),
    "draft_vocab_size": (lambda value: value is None or _positive(value), "a positive integer or null"),
    "options": (lambda value: isinstance(value, dict), "an object"),
    "taps_index": (lambda value: value == TAPS_INDEX, repr(TAPS_INDEX)),
    "lora": (lambda value: value is None or isinstance(value, dict), "an object or null"),
}


@dataclass(frozen=True)
class HeadsConfig:
    """A heads folder's record.

    Attributes:
        kind: a row of ``heads.kinds.KINDS``.
        lookahead: K, how many tokens deep the heads were trained to draft.
        taps: indices into transformers' ``hidden_states``: i is the output of the i-th layer, 0 the embedding,
            ``num_layers`` the last state after the final norm.
        target: whose hidden states these heads read.
        hidden_size, vocab_size: of the target.
        draft_vocab_size: tokens the heads can draft; None for all.
        options: the kind's own settings, complete.
        format_version: of this record and of the tensors' layout.
        taps_index: what ``taps`` count, written down because others count layers, from 0 or from 1.
        lora: settings of the adapter that the weights still hold beside the matrices it is for (``heads/tuned.py``);
            None for ordinary heads, whose record does not name it.
    """

    kind: str
    lookahead: int
    taps: tuple[int, ...]
    target: TargetIdentity
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION
    taps_index: str = TAPS_INDEX
    lora: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """As stored."""
        own = {item.name: getattr(self, item.name) for item in fields(self)}
        if self.lora is None:
            del own["lora"]
        return own | {"taps": list(self.taps), "target": self.target.to_dict()}

    @classmethod
    def from_dict(cls, stored: dict[str, Any], where: str = "config.json") -> HeadsConfig:
        """Read a stored record.

        Raises:
            ConfigError: a key is unknown, missing or of another type, or the version is newer than this code.
        """
        names = [item.name for item in fields(cls)]
        refuse_unknown(stored, names, where)
        missing = [name for name in names if name not in stored and name not in LATER]
        if missing:
            raise ConfigError(f"{where} lacks {', '.join(missing)}: it was not written by save_pretrained")
        if stored["format_version"] != FORMAT_VERSION:
            raise ConfigError(
                f"{where} has format_version {stored['format_version']!r:.80}, this version reads {FORMAT_VERSION}: "
                "update headstart"
            )
        for key, (fits, what) in _TYPES.items():
            if key in stored and not fits(stored[key]):
                raise ConfigError(f"{where}: {key} must be {what}, not {stored[key]!r}")
        try:
            target = TargetIdentity.from_dict(stored["target"])
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
        return cls(**stored | {"taps": tuple(stored["taps"]), "target": target})
