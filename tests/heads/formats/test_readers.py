"""Exports read by something else, written from the formats alone: it drafts what our own decoding drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from heads.formats import export_heads
from tests.heads.formats.cases import CASES, drafted
from tests.heads.formats.engine import BLOCKS, Eagle1, Eagle3
from tests.heads.formats.engine import MEDUSA as MEDUSA_READERS
from tests.heads.small import random_ids


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.to in ("eagle3", "speculators")])
def test_a_reader_of_its_own_drafts_the_same_from_an_eagle_folder(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    made = case.make()
    done = export_heads(made, case.to, tmp_path / "out", engine=case.engine)
    text, root, tokens = random_ids(9)[0], 11, [5, 40, 23]
    ours = drafted(made, text, root, tokens)
    for engine in done.engines:  # one folder, whichever engine says how it counts
        theirs = Eagle3(tmp_path / "out", made.target.model, engine).draft(text, root, tokens)
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one.isfinite(), other.isfinite())
            known = one.isfinite()
            assert float((one[known] - other[known]).abs().max() / one[known].abs().max()) < 1e-10
    wrong = {"vllm": "sglang", "sglang": "vllm"}[done.engines[0]]
    if len(done.engines) == 1 and case.to == "eagle3":
        reader = Eagle3(tmp_path / "out", made.target.model, wrong)
        assert reader.taps != list(made.config.taps), "the reader would see ids that are off by one"


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.to == "eagle1"])
def test_a_reader_of_its_own_drafts_the_same_from_an_eagle1_folder(name: str, tmp_path: Path) -> None:
    made = CASES[name].make()
    export_heads(made, "eagle1", tmp_path / "out", engine=CASES[name].engine)
    text, root, tokens = random_ids(9)[0], 11, [5, 40, 23]
    theirs = Eagle1(tmp_path / "out", made.target.model).draft(text, root, tokens)
    for one, other in zip(drafted(made, text, root, tokens), theirs, strict=True):
        assert float((one - other).abs().max() / one.abs().max()) < 1e-10


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.to == "medusa"])
def test_a_reader_of_its_own_drafts_the_same_from_a_medusa_folder(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    made = case.make()
    export_heads(made, case.to, tmp_path / "out", engine=case.engine)
    text = random_ids(9)[0]
    last = made.target.forward(text[None], hidden=True).hidden
    assert last is not None
    theirs = MEDUSA_READERS[case.engine](tmp_path / "out", made.target.model, last[0, -1])
    for one, other in zip(drafted(made, text, 11, [5, 40]), theirs, strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())
        assert torch.allclose(one[one.isfinite()], other[one.isfinite()], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.to in BLOCKS])
def test_a_reader_of_its_own_drafts_the_same_from_a_block_folder(name: str, tmp_path: Path) -> None:
    made = CASES[name].make()
    export_heads(made, CASES[name].to, tmp_path / "out")
    text = random_ids(9)[0]
    theirs = BLOCKS[CASES[name].to](tmp_path / "out", made.target.model).draft(text, [11, 5, 40, 23])
    ours = drafted(made, text, 11, [5, 40, 23])
    assert len(ours) == len(theirs) == 4
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())
        assert torch.allclose(one[one.isfinite()], other[one.isfinite()], rtol=1e-10, atol=1e-10)
