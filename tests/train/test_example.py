"""A new kind is one file and one row: the one that CONTRIBUTING.md spells out trains, is stored and drafts exactly."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from heads.base import DraftHeads
from heads.grow import Budget, Sampler
from heads.kinds import KINDS
from heads.target import Target
from infer import generate
from infer.verify import RULES, Chooser
from tests.heads.parity import Forced
from tests.heads.small import batch_of, random_ids, read, relative, small_heads, small_target
from tests.infer.exact import Drawing, Text, World, check_law
from tests.tiny import tiny_model
from tests.train.conftest import Launch
from tests.train.world import losses

ROOT = Path(__file__).resolve().parents[2]


def blocks() -> list[str]:
    """The Python that CONTRIBUTING.md shows, block by block."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.M | re.S)


@pytest.fixture
def bigram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[DraftHeads]]:
    """The example, written as a file and entered as its row says."""
    source, row = blocks()
    assert source.startswith('"""Bigram heads') and row.strip() == '"bigram": Bigram,'
    path = tmp_path / "bigram.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("the_example", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "the_example", module)
    spec.loader.exec_module(module)
    kinds: dict[str, type[DraftHeads]] = eval("{" + row + "}", dict(vars(module)))
    for name, kind in kinds.items():
        monkeypatch.setitem(KINDS, name, kind)
    yield kinds["bigram"]


def test_it_keeps_to_the_style_it_is_shown_in() -> None:
    source, _ = blocks()
    assert max(map(len, source.splitlines())) <= 120 and len(source.splitlines()) < 100


def test_it_drafts_what_it_was_trained_to(bigram: type[DraftHeads]) -> None:
    target = small_target()
    made = small_heads("bigram", target, taps=(4,), lookahead=4, draft_vocab=20)
    ids = made.target_ids[random_ids(16, vocab=20)]
    batch = batch_of(target, made.config.taps, ids)
    steps = list(made.unroll(batch))
    for prompt in (1, 6):
        forced = Forced(random_ids(16, vocab=20)[0, prompt + 1 :].tolist())
        made.propose(made.start(batch.taps[:, :prompt], ids[:, : prompt + 1]), Budget.chain(4), forced)
        for step, logits in zip(steps, forced.logits, strict=True):
            assert relative(step.logits[prompt - 1], logits) < 1e-10


def test_it_trains_is_stored_and_decodes_losslessly(bigram: type[DraftHeads], world: Path, launch: Launch) -> None:
    report = launch("--heads.kind", "bigram", "--heads.taps", "none", "--heads.options.rank", 16,
                    "--train.max_steps", 30, "--train.lr", "3e-2")  # fmt: skip
    values = losses(world / "run")
    assert sum(values[s] for s in range(26, 31)) < 0.9 * sum(values[s] for s in range(1, 6))
    assert report["heads"]["kind"] == "bigram" and report["decoded"]["prompts"] == 3
    target = Target.load(str(world / "target"), dtype=torch.float64)
    made = DraftHeads.from_pretrained(world / "run" / "heads", target)
    assert type(made) is bigram and made.config.options["rank"] == 16
    ids = torch.tensor([[1, 2, 3, 4]])
    plain = target.model.generate(ids, max_new_tokens=20, do_sample=False)
    for budget in (Budget.chain(3), Budget(12, 3, 3)):
        out = generate(target.model, ids, made, max_new_tokens=20, do_sample=False, budget=budget)
        assert torch.equal(out.sequences, plain)


@pytest.mark.parametrize("budget", [Budget.chain(2), Budget(5, 2, 2)], ids=["chain", "tree"])
def test_its_samples_follow_the_targets_law(bigram: type[DraftHeads], budget: Budget) -> None:
    world = World(3, seed=1)
    target = Target(tiny_model("llama", vocab=3))
    made = small_heads("bigram", target, taps=(4,), lookahead=2, seed=3)
    taps, _ = read(target, (4,), torch.tensor([[0]]))

    def make(chooser: Chooser, text: Text) -> Any:
        sampler: Sampler = Drawing(chooser)
        return made.propose(made.start(taps, torch.tensor([[0, text[-1]]])), budget, sampler)

    check_law(RULES["token"], make, world, 4, rejected=0.2)
