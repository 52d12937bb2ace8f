"""What the verbs reported, gathered for a card: known by its keys, of these weights, without places of a machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from heads.config import HeadsConfig
from heads.embedded import NAME
from heads.identity import TargetIdentity
from heads.plots import plots
from heads.reports import gather, published, read_reports, without_places
from tests.hub.reports import SHA, bench, certificate, evaluation, training

CONFIG = HeadsConfig("medusa", 3, (30,), TargetIdentity("org/target", None, {}, "f" * 64), 32, 64)


def test_each_report_is_known_by_its_keys() -> None:
    found = gather([training(), bench(), evaluation(), certificate()], SHA)
    assert found.keys() == {"training", "bench", "evaluation", "certificate"}
    assert found["bench"]["speedup"] == 1.534 and found["training"]["steps"] == 400


def test_a_summary_brings_several_and_later_ones_win() -> None:
    summary = {"evaluation": evaluation(), "training": {"steps": 9}, "tokens_per_round": 1.7, "seconds": {"total": 3}}
    found = gather([summary, training(), {"license": "mit"}])
    assert found.keys() == {"evaluation", "training", "tokens_per_round", "license"}
    assert found["training"]["steps"] == 400
    both = gather([training(), {"training": {"steps": 9}}])["training"]
    assert both["steps"] == 9 and both["settings"]["train.lr"] == 2e-3, "parts add up"


@pytest.mark.parametrize("make", [evaluation, bench, certificate])
def test_a_report_of_other_weights_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"report is of other weights \(aaaaaaaaaaaa… there, bbbbbbbbbbbb… here\)"):
        gather([make()], "b" * 64)
    with pytest.raises(ValueError, match="of other weights"):
        gather([{"evaluation": evaluation()}], "b" * 64)


def test_a_report_that_says_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a report with the keys rates, target holds nothing that a card says"):
        gather([{"rates": {}, "target": "x"}])
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"a\.json must hold a JSON object, not a list"):
        read_reports([tmp_path / "a.json"])
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match=r"a\.json is not JSON"):
        read_reports([tmp_path / "a.json"])


def test_what_is_published_names_no_places() -> None:
    found = published(gather([certificate(), evaluation()]), "org/heads", CONFIG, "llama3")
    assert found["certificate"]["heads"]["name"] == "org/heads" and found["certificate"]["heads"]["sha256"] == SHA
    assert found["certificate"]["target"]["name"] == "org/target" and found["target_license"] == "llama3"
    assert "/home" not in json.dumps(without_places(found))
    assert without_places({"prompts": "/a/b.jsonl, builtin:json"}) == {"prompts": "b.jsonl, builtin:json"}


def test_the_embedded_targets_licence_is_known() -> None:
    embedded = HeadsConfig("medusa", 3, (30,), TargetIdentity(NAME, None, {}, "f" * 64), 32, 64)
    assert published({}, "org/heads", embedded, None)["target_license"] == "apache-2.0"
    assert published({"target_license": "mit"}, "org/heads", CONFIG, "llama3")["target_license"] == "mit"
    assert "target_license" not in published({}, "org/heads", CONFIG, None)


def test_pictures_are_drawn_of_what_was_measured_and_are_the_same_again() -> None:
    report = gather([evaluation(), bench()])
    found = plots(report)
    assert list(found) == ["plots/acceptance.png", "plots/tasks.png", "plots/speed.png"]
    assert all(picture.startswith(b"\x89PNG") and len(picture) > 5000 for picture in found.values())
    assert plots(report) == found
    assert plots(gather([training(), certificate()])) == {}
    single = evaluation()
    for budget in single["budgets"].values():
        del budget["by_category"]["coding"]
    assert list(plots({"evaluation": single})) == ["plots/acceptance.png"], "one task is no comparison"


def test_pictures_without_matplotlib_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[plot\]'.*--no-plots"):
        plots({"bench": bench()})
