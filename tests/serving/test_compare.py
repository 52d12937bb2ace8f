"""The serving check's judgement, on made-up results: every way in which it must fail, fails."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.serving.compare import Run, alike, compare, table
from tests.serving.requirements import required

# K = 2, at most 8 new tokens: the rounds that begin behind 1, 2 and 5 tokens are whole, the one behind 6 may be cut
TEXT, STEPS = [1, 2, 3, 4, 5, 6, 7, 8], [1, 1, 3, 1, 2]
BASE: dict[str, Any] = {"version": "0", "tokens": [TEXT] * 800, "steps": [[1] * 8] * 800, "drafts": 0, "accepted": []}
SERVED = BASE | {"steps": [STEPS] * 800, "drafts": 3200, "accepted": [1600, 800]}
OURS = Run([TEXT] * 800, [STEPS] * 800, 2, 8)
HEAD = {"vllm": "0", "machine": "m", "dtype": "float32", "prompts": 800, "max_new_tokens": 8, "target": "t"}


def changed(steps: list[int], texts: int) -> Run:
    """Ours, some texts of which came in other steps."""
    return Run(OURS.tokens, [steps] * texts + [STEPS] * (800 - texts), 2, 8)


def test_equal_texts_and_near_acceptance_pass() -> None:
    found = compare(BASE, SERVED, OURS)
    assert found["ok"] and found["rounds"] == found["our_rounds"] == 2400 and found["apart"] == 0
    assert found["accepted"] == pytest.approx([1 / 3, 1 / 3])
    assert (found["same_place"], found["same_accepted"]) == (2400, 2400)
    near = compare(BASE, SERVED, changed([1, 2, 3, 2], 40))
    assert near["ok"] and 0 < near["apart"] < 0.03 and near["same_place"] > near["same_accepted"]
    text = table(HEAD | {"exports": {"eagle3 flat": near}, "ok": True, "full": True})
    assert "800/800" in text and "0.333 0.333" in text and text.endswith("as it must be") and "FAILED" not in text


@pytest.mark.parametrize(
    ("served", "ours"),
    [
        (SERVED | {"tokens": [[*TEXT[:-1], 9], *[TEXT] * 799]}, OURS),  # one token is another
        (SERVED | {"tokens": [TEXT[:-1], *[TEXT] * 799]}, OURS),  # a text ends early
        (SERVED, changed([1, 2, 1, 1, 1, 2], 200)),  # accepted elsewhere
        (SERVED, changed([1, 1, 1, 1, 1, 3], 200)),  # and too rarely
        (SERVED | {"steps": [STEPS] * 600 + [[8]] * 200, "drafts": 2400}, OURS),  # 1,800 rounds that count
        (SERVED, changed([8], 200)),
    ],
)
def test_everything_else_fails(served: dict[str, Any], ours: Run) -> None:
    found = compare(BASE, served, ours)
    assert not found["ok"]
    text = table(HEAD | {"exports": {"x": found}, "ok": False, "full": False})
    assert "FAILED" in text and "NOT AS IT MUST BE" in text and "a trial" in text


def test_results_that_prove_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="drafted nothing"):
        compare(BASE, BASE, OURS)
    with pytest.raises(ValueError, match="1 answers where the base has 800"):
        compare(BASE, SERVED | {"tokens": [TEXT]}, OURS)
    with pytest.raises(ValueError, match="counted 3199 drafts where its texts came in 3200 rounds"):
        compare(BASE, SERVED | {"drafts": 3199}, OURS)


def test_rounds_that_something_may_have_cut_are_left_out() -> None:
    texts = [TEXT, [1, 2, 3, 4]]  # to the length that was asked for; to its own end
    run = Run(texts, [STEPS, [1, 2, 1]], 2, 8)
    assert list(run.whole()) == [(0, 1, 0), (0, 2, 2), (0, 5, 0), (1, 1, 1)]
    assert run.acceptance() == (4, [0.5, 0.25])


def test_rounds_are_alike_behind_the_same_text_alone() -> None:
    one = Run([TEXT, TEXT], [STEPS, STEPS], 2, 8)
    other = Run([TEXT, [1, 9, *TEXT[2:]]], [[1, 1, 1, 2, 3], STEPS], 2, 8)
    # in the first text both begin behind 1, 2 and 5 tokens and accept 0/0, 2/0 and 0/2; in the second, behind 1 alone
    assert list(other.whole())[:4] == [(0, 1, 0), (0, 2, 0), (0, 3, 1), (0, 5, 2)]
    assert alike(one, other) == (4, 2)


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
