"""Out and in again: tensors bit-equal, logits equal; imported heads decode the target's own text and train on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import infer
from heads.base import DraftHeads
from heads.formats import export_heads, import_heads, read_heads
from tests.heads.formats.cases import CASES, USUAL
from tests.heads.formats.engine import stored
from tests.heads.small import batch_of, logits_of, random_ids, small_heads, small_target, soft_ce

DECODED = [
    "eagle3 3.1",
    "eagle3 sglang",
    "speculators",
    "eagle1 vllm",
    "medusa own",
    "medusa vllm reduced",
    "dflash shape",
    "dspark full",
]
TRAINED = ["eagle3 reduced", "eagle3 3.1", "eagle1", "speculators 3.1", "medusa", "medusa vllm own", "dflash"]
TRAINED += ["dspark full"]


def come_back(name: str, tmp_path: Path) -> tuple[DraftHeads, DraftHeads]:
    """A case's heads, and the same after export and import into a heads folder."""
    case = CASES[name]
    made = case.make()
    export_heads(made, case.to, tmp_path / "out", engine=case.engine)
    lookahead = None if case.to in ("medusa", "dflash", "dspark") else made.config.lookahead
    done = import_heads(tmp_path / "out", case.target(), tmp_path / "heads", engine=case.engine, lookahead=lookahead)
    assert done.format == case.to
    return made, DraftHeads.from_pretrained(tmp_path / "heads", case.target())


@pytest.mark.parametrize("name", CASES)
def test_what_went_out_comes_in_bit_by_bit(name: str, tmp_path: Path) -> None:
    made, back = come_back(name, tmp_path)
    assert back.config == made.config and not back.training
    assert back.state_dict().keys() == made.state_dict().keys()
    for key, value in made.state_dict().items():
        assert torch.equal(back.state_dict()[key], value) and back.state_dict()[key].dtype == value.dtype, key
    assert torch.equal(logits_of(back), logits_of(made))


@pytest.mark.parametrize("name", CASES)
def test_a_second_export_is_the_first(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    _, back = come_back(name, tmp_path)
    export_heads(back, case.to, tmp_path / "again", engine=case.engine)
    (config, tensors), (other_config, others) = stored(tmp_path / "out"), stored(tmp_path / "again")
    assert config == other_config and tensors.keys() == others.keys()
    assert all(torch.equal(tensors[key], others[key]) for key in tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_narrower_export_holds_the_rounded_values(dtype: torch.dtype, tmp_path: Path) -> None:
    target = small_target(layers=8)
    made = small_heads(target=target, **USUAL, draft_vocab=20)
    for form in ("eagle3", "speculators"):
        export_heads(made, form, tmp_path / form, dtype=dtype)
        back = read_heads(tmp_path / form, target, lookahead=3).heads
        for key, value in made.state_dict().items():
            wanted = value if key == "target_ids" else value.to(dtype)
            assert torch.equal(back.state_dict()[key], wanted), key


@pytest.mark.parametrize("name", DECODED)
def test_imported_heads_decode_the_targets_own_text(name: str, tmp_path: Path) -> None:
    _, back = come_back(name, tmp_path)
    model, prompt = back.target.model, random_ids(6)
    plain = model.generate(prompt, max_new_tokens=24, do_sample=False)
    out = infer.generate(model, prompt, draft=back, max_new_tokens=24, do_sample=False)
    assert torch.equal(out.sequences, plain)
    assert out.stats.proposed > 0


@pytest.mark.parametrize("name", TRAINED)
def test_imported_heads_train_on(name: str, tmp_path: Path) -> None:
    _, back = come_back(name, tmp_path)
    batch = batch_of(back.target, back.config.taps, random_ids(12, rows=2))
    optimizer = torch.optim.SGD([p for p in back.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for _ in range(3):
        report = back.loss(batch, soft_ce)
        losses.append(float(report.total.detach() / report.count))
        optimizer.zero_grad()
        (report.total / report.count).backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in back.parameters())
        optimizer.step()
    assert losses[2] < losses[1] < losses[0]
