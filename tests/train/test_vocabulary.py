"""The draft vocabulary of a run: chosen by size or by coverage, and what it lacks is reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from heads import DraftHeads, Target
from heads.kinds import KINDS
from tests.train.conftest import Launch
from train.conversations import Conversations

TAPS = {"eagle": "1,2,3", "block": "1,2,3"}


def answers(world: Path, part: str) -> torch.Tensor:
    """(V,) how often the target says each token, counted from what was prepared."""
    said = Conversations.load(world / "run" / "prepared" / part)
    counts = torch.zeros(264, dtype=torch.long)
    for index in range(len(said)):
        for token, own in zip(said.ids(index).tolist(), said.loss_mask(index).tolist(), strict=True):
            counts[token] += own
    return counts


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_takes_a_share_of_what_is_said(
    world: Path, launch: Launch, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    report = launch("--heads.kind", kind, "--heads.taps", TAPS.get(kind, "none"), "--heads.draft_vocab_size", "none",
                    "--heads.draft_vocab_coverage", 0.6, "--train.max_steps", 1, "--eval.prompts", 0)  # fmt: skip
    counts, heldout = answers(world, "train"), answers(world, "heldout")
    ordered = counts.sort(descending=True).values
    size = next(n for n in range(1, 265) if int(ordered[:n].sum()) >= 0.6 * int(counts.sum()))
    heads = DraftHeads.from_pretrained(world / "run" / "heads", Target.load(str(world / "target"), dtype=torch.float32))
    assert heads.config.draft_vocab_size == size and heads.draft_ids is not None
    kept = heads.draft_ids
    missing = [1 - int(part[kept].sum()) / int(part.sum()) for part in (counts, heldout)]
    assert 0.2 < missing[0] <= 0.4
    assert report["draft_vocabulary"] == {
        "tokens": size,
        "of": 264,
        "never_drafted": {"train": pytest.approx(missing[0]), "heldout": pytest.approx(missing[1])},
    }
    stored = json.loads((world / "run" / "report.json").read_text())
    assert stored["draft_vocabulary"] == report["draft_vocabulary"]
    said = capfd.readouterr()
    assert (
        f"draft vocabulary of {size} covers {100 - 100 * missing[0]:.1f}% of the answer tokens; " in said.out + said.err
    )
    assert f"{100 * missing[0]:.1f}% can never be drafted" in said.out + said.err


def test_everything_said_and_the_whole_vocabulary(world: Path, launch: Launch) -> None:
    short = ("--train.max_steps", 1, "--eval.prompts", 0, "--eval.conversations", 0)
    report = launch("--heads.draft_vocab_size", "none", "--heads.draft_vocab_coverage", 1, *short)
    assert report["draft_vocabulary"]["never_drafted"]["train"] == 0
    assert report["draft_vocabulary"]["tokens"] == int((answers(world, "train") > 0).sum())
    report = launch("--heads.draft_vocab_size", "none", *short, "--output.folder", world / "whole")
    assert report["draft_vocabulary"] is None


def test_a_size_and_a_share_together_are_refused(world: Path, launch: Launch) -> None:
    with pytest.raises(ValueError, match=r"draft_vocab_size is 100 and heads\.draft_vocab_coverage 0\.9: name one"):
        launch("--heads.draft_vocab_coverage", 0.9)
    with pytest.raises(ValueError, match=r"draft_vocab_coverage is 95\.0, it must be above 0 and at most 1"):
        launch("--heads.draft_vocab_size", "none", "--heads.draft_vocab_coverage", 95)
    assert not (world / "run" / "heads").exists()
