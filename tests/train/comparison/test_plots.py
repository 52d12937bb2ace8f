"""Pictures of a comparison: every arm can be told from every other; the control that is always right is not drawn."""

from __future__ import annotations

from train.compare.plots import looks
from train.compare.score import ITSELF, LOOKUP, NOTHING


def test_no_two_arms_look_alike() -> None:
    names = [f"arm {number}" for number in range(12)]
    found = looks([*names, NOTHING, LOOKUP, ITSELF])
    assert list(found) == [*names, NOTHING, LOOKUP]
    assert len({tuple(look.items()) for look in found.values()}) == 14
    greys = {found[name]["color"] for name in (NOTHING, LOOKUP)}
    assert greys.isdisjoint(found[name]["color"] for name in names)
    assert list(looks(["one"])) == ["one"], "controls that were not measured are not drawn"
