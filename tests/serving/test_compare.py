"""The serving check's judgement, on made-up results: every way in which it must fail, fails."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest

from infer.metrics import Round, Stats
from tests.serving.compare import Ours, compare, table
from tests.serving.requirements import required

BASE: dict[str, Any] = {"version": "0", "tokens": [[1, 2, 3], [4, 5]], "rounds": 0, "accepted": []}
SERVED = BASE | {"rounds": 2000, "accepted": [1000, 400]}
OURS = Ours(2100, [0.52, 0.19])


def test_equal_texts_and_near_acceptance_pass() -> None:
    found = compare(BASE, SERVED, OURS)
    assert found["ok"] and found["accepted"] == [0.5, 0.2] and found["apart"] == pytest.approx(0.02)
    report = {"vllm": "0", "machine": "m", "dtype": "float32", "prompts": 2, "max_new_tokens": 3, "target": "t"}
    text = table(report | {"exports": {"eagle3 flat": found}, "ok": True, "full": True})
    assert "2/2" in text and "0.500 0.200" in text and text.endswith("as it must be") and "FAILED" not in text


@pytest.mark.parametrize(
    ("served", "ours"),
    [
        (SERVED | {"tokens": [[1, 2, 3], [4, 6]]}, OURS),  # one token is another
        (SERVED | {"tokens": [[1, 2, 3], [4]]}, OURS),  # a text ends early
        (SERVED, Ours(2100, [0.54, 0.2])),  # accepted too rarely at the first position
        (SERVED, Ours(2100, [0.5, 0.16])),  # and too often at the second
        (SERVED, Ours(1999, [0.5, 0.2])),
        (SERVED | {"rounds": 1999, "accepted": [1000, 400]}, OURS),
    ],
)
def test_everything_else_fails(served: dict[str, Any], ours: Ours) -> None:
    found = compare(BASE, served, ours)
    assert not found["ok"]
    report = {"vllm": "0", "machine": "m", "dtype": "float32", "prompts": 2, "max_new_tokens": 3, "target": "t"}
    text = table(report | {"exports": {"x": found}, "ok": False, "full": False})
    assert "FAILED" in text and "NOT AS IT MUST BE" in text and "a trial" in text


def test_an_engine_that_did_not_draft_proves_nothing() -> None:
    with pytest.raises(ValueError, match="drafted nothing"):
        compare(BASE, BASE, OURS)
    with pytest.raises(ValueError, match="1 answers where the base has 2"):
        compare(BASE, SERVED | {"tokens": [[1, 2, 3]]}, OURS)


def test_rounds_that_a_texts_end_cut_are_left_out() -> None:
    log = [Round(2, 2, 2, 3), Round(2, 2, 0, 1), Round(1, 1, 1, 2), Round(2, 2, 1, 2), Round(2, 2, 2, 1)]
    found = Ours.of([Stats(log=log), Stats(log=[Round(2, 2, 2, 3)])], 2)
    assert found == Ours(3, [2 / 3, 1 / 3])


def test_requirements_leave_torch_out(tmp_path: Path) -> None:
    wheel = tmp_path / "engine-1-py3-none-any.whl"
    lines = ["torch==2.13.0+cpu", "torchvision; platform_machine != 'riscv64'", "numpy>=2", "x; extra == 'bench'"]
    lines += ["y==1; python_version < '3'", "z==2; python_version > '3'"]
    metadata = "Metadata-Version: 2.1\nName: engine\nVersion: 1\n" + "".join(
        f"Requires-Dist: {line}\n" for line in lines
    )
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("engine-1.dist-info/METADATA", metadata)
    assert required(wheel) == ["numpy>=2", 'z==2; python_version > "3"']
