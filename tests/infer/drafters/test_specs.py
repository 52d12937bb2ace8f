"""Spec strings: what each means, and what is said of those that mean nothing."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from heads.target import Target
from infer.drafters import FirstToSpeak, HeadsDrafter, LookupDrafter, Merged, NoDrafter, make
from infer.drafters.early_layers import EarlyLayersDrafter
from infer.drafters.specs import LONG, SHORTEST
from tests.heads.small import small_heads
from tests.infer.drafters.common import target_of
from tests.tiny import tiny_model


def target() -> Target:
    return target_of("llama")


@cache
def heads() -> Any:
    return small_heads("medusa", target())


def shape(drafter: Any) -> Any:
    """Nested names of classes, with lookup's shortest match."""
    if isinstance(drafter, FirstToSpeak | Merged):
        return (type(drafter).__name__, [shape(part) for part in drafter.parts])
    return drafter.shortest if isinstance(drafter, LookupDrafter) else type(drafter)


def read(spec: str, with_heads: bool = True) -> Any:
    return make(spec, heads() if with_heads else None, target())


def test_single_names() -> None:
    assert shape(read("none")) is NoDrafter
    assert read(" heads ").heads is heads()
    assert shape(read("lookup")) == SHORTEST and shape(read("lookup:7")) == 7 and shape(read("lookup : 3")) == 3
    layers = read("layers:0-1,3")
    assert isinstance(layers, EarlyLayersDrafter) and layers.layers == (0, 1, 3)


def test_a_model_by_its_folder(tmp_path: Any) -> None:
    tiny_model("llama", layers=1).save_pretrained(tmp_path / "small")
    drafter = read(f"lookup+model:{tmp_path / 'small'}")
    assert drafter.names == ("lookup", "model") and drafter.parts[1].model.num_layers == 1
    with pytest.raises(OSError):
        read(f"model:{tmp_path / 'absent'}")


@pytest.mark.parametrize(
    ("spec", "meaning"),
    [
        ("lookup+heads", ("FirstToSpeak", [LONG, HeadsDrafter])),
        (" lookup  +\theads ", ("FirstToSpeak", [LONG, HeadsDrafter])),
        ("lookup:2+heads", ("FirstToSpeak", [2, HeadsDrafter])),
        ("heads+lookup", ("FirstToSpeak", [HeadsDrafter, SHORTEST])),
        ("lookup|heads", ("Merged", [SHORTEST, HeadsDrafter])),
        ("lookup | layers:0-2 | heads", ("Merged", [SHORTEST, EarlyLayersDrafter, HeadsDrafter])),
        ("lookup+lookup:1|heads", ("FirstToSpeak", [LONG, ("Merged", [1, HeadsDrafter])])),
        ("lookup|heads+none", ("FirstToSpeak", [("Merged", [SHORTEST, HeadsDrafter]), NoDrafter])),
    ],
)
def test_joined_names(spec: str, meaning: Any) -> None:
    assert shape(read(spec)) == meaning


def test_the_names_are_the_sources() -> None:
    assert read("lookup:3+layers:0-1").names == ("lookup", "layers")
    assert read("lookup|heads").names == ("lookup", "heads")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("looup", "'looup', which is not known — did you mean 'lookup'?"),
        ("lookup+head", "'head', which is not known — did you mean 'heads'?"),
        ("something", "'something', which is not known: use heads, lookup, model, layers, none"),
        ("", "an empty place"),
        ("lookup+", "an empty place"),
        ("|heads", "an empty place"),
        ("lookup++heads", "an empty place"),
        (":3", "an empty place"),
        ("lookup:", "nothing behind 'lookup' and its colon"),
        ("lookup:x", "names no shortest match"),
        ("lookup:-1", "names no shortest match"),
        ("lookup:0", "matches of 1 token or more, not 0"),
        ("heads:3", "'heads' takes nothing behind a colon"),
        ("none:3", "'none' takes nothing behind a colon"),
        ("layers:9-4", "9-4"),
        ("layers", "layers"),
        ("model", "model"),
    ],
)
def test_what_means_nothing_is_refused(spec: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        read(spec)
    assert message in str(error.value)


def test_heads_that_are_not_there() -> None:
    for spec in ("heads", "lookup+heads", "lookup|heads"):
        with pytest.raises(ValueError, match='draft="heads" needs heads'):
            read(spec, with_heads=False)


def test_other_ways_to_name_a_drafter() -> None:
    assert isinstance(make(None, None, target()), NoDrafter)
    assert make(None, heads(), target()).heads is heads()  # type: ignore[attr-defined]
    assert make(heads(), None, target()).heads is heads()  # type: ignore[attr-defined]
    own = LookupDrafter()
    assert make(own, None, target()) is own
    with pytest.raises(ValueError, match="not int"):
        make(3, None, target())
