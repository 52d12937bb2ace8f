"""The stored record of heads: read back whole, and refused with the key's name where anything is odd."""

from __future__ import annotations

import json
from typing import Any

import pytest

from heads.config import ConfigError, HeadsConfig, nearest, refuse_unknown
from heads.identity import TargetIdentity

TARGET = TargetIdentity("org/target", "abc123", {"hidden_size": 8, "model_type": "llama"}, "00ff", None, None)
CONFIG = HeadsConfig("eagle", 5, (2, 4, 6), TARGET, 8, 100, 32, {"rope_theta": 1e4, "fc_norm": True})


def stored(**values: Any) -> dict[str, Any]:
    """As it comes back from a file."""
    return json.loads(json.dumps(CONFIG.to_dict())) | values


def test_it_comes_back_as_it_was() -> None:
    assert HeadsConfig.from_dict(stored()) == CONFIG
    whole = HeadsConfig.from_dict(stored(draft_vocab_size=None))
    assert whole.draft_vocab_size is None and isinstance(whole.taps, tuple)
    assert stored()["format_version"] == 1 and stored()["taps"] == [2, 4, 6]


def test_unknown_keys_name_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"my\.json has the unknown key 'lookahed' — did you mean 'lookahead'\?"):
        HeadsConfig.from_dict(stored(lookahed=3), "my.json")
    with pytest.raises(ConfigError, match=r"unknown key 'zzz' \(known: kind, lookahead, taps") as caught:
        HeadsConfig.from_dict(stored(zzz=3))
    assert "did you mean" not in str(caught.value)


def test_it_says_what_taps_count() -> None:
    """Others count layers, from 0 or from 1: here a tap is a place in transformers' ``hidden_states``."""
    assert stored()["taps_index"] == "hidden_states"
    older = stored()
    del older["taps_index"]
    assert HeadsConfig.from_dict(older) == CONFIG
    with pytest.raises(ConfigError, match="here: taps_index must be 'hidden_states', not 'layers'"):
        HeadsConfig.from_dict(stored(taps_index="layers"), "here")


@pytest.mark.parametrize("key", [key for key in CONFIG.to_dict() if key != "taps_index"])
def test_each_missing_key_is_named(key: str) -> None:
    short = stored()
    del short[key]
    with pytest.raises(ConfigError, match=f"lacks {key}: it was not written by save_pretrained"):
        HeadsConfig.from_dict(short)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("kind", [None, 3, ["eagle"]]),
        ("lookahead", [0, -1, 2.0, "5", None, True]),
        ("taps", [None, 3, "123", [1, "2"], [1.0], [True]]),
        ("hidden_size", [0, "8", None]),
        ("vocab_size", [0, 1.5, None]),
        ("draft_vocab_size", [0, -3, "32", False]),
        ("options", [None, [], "fc_norm"]),
        ("target", [None, "org/target", []]),
    ],
)
def test_values_of_another_type_are_refused_by_name(key: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=rf"here: {key} must be .*, not "):
            HeadsConfig.from_dict(stored(**{key: value}), "here")


def test_a_newer_format_is_not_guessed_at() -> None:
    with pytest.raises(ConfigError, match="format_version 2, this version reads 1: update headstart"):
        HeadsConfig.from_dict(stored(format_version=2))


def test_an_odd_target_record_is_refused() -> None:
    record = TARGET.to_dict() | {"sha": "x"}
    with pytest.raises(ConfigError, match=r"here: .*unknown fields \['sha'\]"):
        HeadsConfig.from_dict(stored(target=record), "here")


def test_nearest() -> None:
    assert nearest("medsa", ["eagle", "medusa"]) == " — did you mean 'medusa'?"
    assert nearest("qqqq", ["eagle", "medusa"]) == ""
    refuse_unknown([], ["a"], "x")
    refuse_unknown(["a"], ["a"], "x")
