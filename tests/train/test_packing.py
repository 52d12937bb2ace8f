"""Packed rows: the loss of the whole is the sum of the parts', for every kind, and no text knows of another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import heads.judge as judge_module
import train.features as features
from data.pack import pack
from heads.base import DraftHeads, LossReport
from heads.judge import TrainingBatch
from heads.kinds import KINDS
from heads.target import Target
from tests.heads.small import ON_LAST_STATE, number, small_heads, soft_ce
from tests.tiny import tiny_model
from tests.train.conftest import Launch
from tests.train.world import Rows, conversations, losses, tiny_target
from train.batches import packed_groups, split_step
from train.cache import CacheSpec, open_or_build
from train.conversations import Conversations
from train.features import FeatureSource, OnlineFeatures
from train.packing import Packed, PackedOnline, check_packable, pack_batch
from train.ranks import Ranks

LENGTHS = [9, 5, 17, 12, 5, 4, 2, 3]
TAPS = (1, 2, 4)
DOUBLE = torch.float64
ANCHORED = ("block", "mtp")  # whose training passes draw anchors


def made(kind: str, target: Target, **options: Any) -> DraftHeads:
    """Drafting so deep that a row reaches past what has no mark of the next text."""
    options = {"lookahead": 5} | options
    return small_heads(kind, target, taps=None if kind in ON_LAST_STATE else TAPS, **options)


def taps_of(heads: DraftHeads) -> tuple[int, ...]:
    return tuple(heads.config.taps)


def source(target: Target, taps: Sequence[int], lengths: Sequence[int] = LENGTHS, prompt: int = 1) -> OnlineFeatures:
    return OnlineFeatures(target, conversations(lengths, prompt=prompt), taps, DOUBLE)


def packed(inner: OnlineFeatures) -> list[FeatureSource]:
    """Both ways to pack: the target reads packed rows, or what it read is laid out anew."""
    return [PackedOnline(inner.target, inner.conversations, inner.taps, DOUBLE), Packed(inner)]


def assert_sum(whole: LossReport, parts: Sequence[LossReport]) -> None:
    """To 1e-10: sums, counts and terms at every draft position; overlap to what float32 log-sum-exps hold."""
    assert number(whole.total) == pytest.approx(sum(number(part.total) for part in parts), rel=1e-10)
    assert whole.counts.tolist() == sum(part.counts for part in parts).tolist()  # type: ignore[union-attr]
    assert whole.accepted.tolist() == sum(part.accepted for part in parts).tolist()  # type: ignore[union-attr]
    for name, values in whole.terms.items():
        there = [sum(column) for column in zip(*(part.terms[name].tolist() for part in parts), strict=True)]
        assert values.tolist() == pytest.approx(there, rel=1e-10)
    overlap = [sum(column) for column in zip(*(part.overlap.tolist() for part in parts), strict=True)]
    assert whole.overlap.tolist() == pytest.approx(overlap, rel=1e-6)


IN_A_WINDOW: list[tuple[str, dict[str, Any]]] = [
    (kind, {"window": 3}) for kind in ("eagle", "eagle1", "hydra", "block")
]


@pytest.mark.parametrize(("kind", "options"), [*((kind, {}) for kind in KINDS), *IN_A_WINDOW])
def test_a_packed_loss_is_the_sum_of_separate_ones(kind: str, options: dict[str, Any]) -> None:
    """And its gradient is the sum of theirs."""
    target = tiny_target()
    heads = made(kind, target, **options)
    inner = source(target, taps_of(heads))
    every = list(range(len(LENGTHS)))
    parts = [heads.loss(inner.batch([i]), soft_ce) for i in every]
    total = torch.stack([part.total for part in parts]).sum()
    wanted = torch.autograd.grad(total, list(heads.parameters()))
    for one in packed(inner):
        batch = one.batch(every)
        assert batch.ids.shape == (4, 17) and batch.documents is not None
        whole = heads.loss(batch, soft_ce)
        assert_sum(whole, parts)
        assert float(whole.count) == sum(float(heads.count(inner.conversations.loss_mask(i)[None])) for i in every)
        for got, right in zip(torch.autograd.grad(whole.total, list(heads.parameters())), wanted, strict=True):
            torch.testing.assert_close(got, right, rtol=1e-10, atol=1e-10 * float(right.abs().max()))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ANCHORED])
def test_the_same_while_training(kind: str) -> None:
    target = tiny_target()
    heads = made(kind, target).train()
    inner = source(target, taps_of(heads))
    parts = [heads.loss(inner.batch([i]), soft_ce) for i in range(4)]
    for one in packed(inner):
        assert_sum(heads.loss(one.batch(range(4)), soft_ce), parts)


@pytest.mark.parametrize("kind", ANCHORED)
def test_each_text_draws_its_own_number_of_anchors(kind: str) -> None:
    target = tiny_target()
    heads = made(kind, target, anchors=0.3).train()
    batch = Packed(source(target, taps_of(heads))).batch(range(8))
    assert batch.documents is not None
    step = next(iter(heads.unroll(batch)))
    drawn = [batch.texts[b, r].item() for b, r in zip(step.batch, step.row, strict=True)]
    trained = torch.zeros_like(batch.loss_mask)
    trained[:, :-2] = batch.loss_mask[:, 2:]
    rows = [int((batch.texts[trained] == text).sum()) for text in batch.texts[trained].unique()]
    assert sorted(rows) == [1, 2, 3, 3, 7, 10, 15]
    assert sorted(drawn.count(text) for text in set(drawn)) == [1, 1, 1, 1, 3, 3, 5], "0.3 of each, rounded up"
    assert len(drawn) == int(heads.loss(batch, soft_ce).count) == 15


def drafted(kind: str, first: Sequence[int], second: Sequence[int]) -> tuple[list[list[int]], Tensor]:
    """Rows judged at each draft position, and all logits, of two texts of one row."""
    target = tiny_target()
    heads = made(kind, target, lookahead=3)
    texts = [{"input_ids": np.array(ids), "loss_mask": [True] * len(ids)} for ids in (first, second)]
    both = Conversations(Rows(texts), "memory")
    ids = torch.tensor([*first, *second])[None]
    documents = torch.tensor([[1] * len(first) + [2] * len(second)])
    one = PackedOnline(target, both, taps_of(heads), DOUBLE)
    with pytest.MonkeyPatch.context() as patch:  # both in one row, though each is as long as a row may be
        patch.setattr("train.packing.pack", lambda rows, block: pack(rows, ids.shape[1]))
        batch = one.batch([0, 1])
    assert torch.equal(batch.ids, ids) and batch.documents is not None and torch.equal(batch.documents, documents)
    steps = list(heads.unroll(batch))
    teacher = judge_module.TeacherRows(target, batch, None)
    judged = [step.row[teacher.rows(step, j) >= 0].tolist() for j, step in enumerate(steps)]
    with torch.no_grad():
        return judged, torch.stack([step.logits for step in steps])


FIRST, SECOND = [7, 3, 44, 12], [9, 30, 21, 5, 60, 7]


@pytest.mark.parametrize("kind", KINDS)
def test_two_documents_of_four_and_six_tokens(kind: str) -> None:
    """None is drafted across the border: not from 2 and 3 at the first position, nor 1 at the second, nor 0 at the
    third; and what stands in the first says nothing to the second."""
    judged, logits = drafted(kind, FIRST, SECOND)
    assert judged == [[0, 1, 4, 5, 6, 7], [0, 4, 5, 6], [4, 5]]
    again, others = drafted(kind, [1, 2, 50, 13], SECOND)
    assert again == judged
    assert torch.equal(others[:, 2:], logits[:, 2:])
    assert not torch.equal(others[:, :2], logits[:, :2])


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "qwen2moe"])
def test_the_target_reads_each_text_of_a_row_by_itself(family: str) -> None:
    """Sliding windows and learned positions included."""
    extra: dict[str, Any] = {"sliding_window": 8} if family == "mistral" else {}
    target = Target(tiny_model(family, **extra), name=family)
    inner = source(target, TAPS)
    ours, theirs = (one.batch(range(8)) for one in packed(inner))
    for name in ("ids", "loss_mask", "mask", "documents"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    here = ours.mask
    for name in ("taps", "hidden"):
        torch.testing.assert_close(getattr(ours, name)[here], getattr(theirs, name)[here], rtol=1e-10, atol=1e-10)
    judged = torch.zeros_like(here)
    judged[:, :-1] = ours.loss_mask[:, 1:]
    assert torch.equal(ours.top[judged], theirs.top[judged])
    torch.testing.assert_close(ours.lse[judged], theirs.lse[judged])


def blind_to_texts(patch: pytest.MonkeyPatch) -> None:
    """The heads' attention crosses texts."""
    patch.setattr(TrainingBatch, "same_text", lambda self, rows: torch.ones(1, 1, 1, dtype=torch.bool))


def positions_run_on(patch: pytest.MonkeyPatch) -> None:
    """The target counts positions over the whole row."""

    def run_on(documents: Tensor) -> Tensor:
        return torch.arange(documents.shape[1]).expand(documents.shape)

    patch.setattr(features, "text_positions", run_on)


def target_reads_on(patch: pytest.MonkeyPatch) -> None:
    """The target's attention crosses texts."""

    def causal(documents: Tensor) -> Tensor:
        length = documents.shape[1]
        return torch.ones(length, length, dtype=torch.bool).tril().expand(len(documents), 1, -1, -1)

    patch.setattr(features, "attention", causal)


def targets_cross(patch: pytest.MonkeyPatch) -> None:
    """Tokens of the next text are drafted."""
    rows = judge_module.TeacherRows.rows

    def crossing(self: judge_module.TeacherRows, step: judge_module.UnrollStep, j: int) -> Tensor:
        self.documents = None
        return rows(self, step, j)

    patch.setattr(judge_module.TeacherRows, "rows", crossing)


@pytest.mark.parametrize("kind", ["eagle", "eagle1", "hydra", "block"])
@pytest.mark.parametrize("mistake", [blind_to_texts, positions_run_on, target_reads_on, targets_cross])
def test_planted_mistakes_show(mistake: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary positions count in the target only relative to each other, so there learned ones must show it."""
    target = Target(tiny_model("gpt2" if mistake is positions_run_on else "llama"), name="tiny")
    heads = made(kind, target)
    inner = source(target, taps_of(heads))
    with torch.no_grad():
        parts = sum(number(heads.loss(inner.batch([i]), soft_ce).total) for i in range(8))
        mistake(monkeypatch)
        whole = PackedOnline(target, inner.conversations, inner.taps, DOUBLE).batch(range(8))
        assert abs(number(heads.loss(whole, soft_ce).total) / parts - 1) > 1e-4


def test_a_cache_is_packed_as_it_is(tmp_path: Path) -> None:
    target = tiny_target()
    inner = source(target, TAPS)
    cached = open_or_build(CacheSpec(target, inner.conversations, TAPS, DOUBLE), tmp_path, Ranks())
    ours, theirs = Packed(cached).batch([3, 1, 4]), pack_batch(inner.batch([3, 1, 4]))
    assert ours.documents is not None and ours.documents.tolist() == [[1] * 12, [1] * 5 + [2] * 5 + [0, 0]]
    assert ours.positions[1, :10].tolist() == [0, 1, 2, 3, 4] * 2
    assert torch.equal(ours.ids, theirs.ids) and torch.equal(ours.loss_mask, theirs.loss_mask)
    torch.testing.assert_close(ours.taps, theirs.taps, rtol=1e-12, atol=1e-12)


def test_targets_that_cannot_keep_texts_apart_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"because its ALiBi biases go by places: set train\.packing to false"):
        check_packable(Target(tiny_model("falcon", alibi=True), name="falcon"))
    target = tiny_target()
    check_packable(target)
    monkeypatch.setattr(target.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(ValueError, match=r"packed rows with attention 'flash_attention_2': set train\.packing"):
        check_packable(target)
    with monkeypatch.context() as patch:
        patch.setattr(target, "layer_types", ("full_attention", "linear_attention"))
        with pytest.raises(ValueError, match="packed rows: layers of type linear_attention"):
            check_packable(target)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 200), st.integers(1, 3))
def test_every_conversation_is_in_one_batch_of_a_bounded_size(lengths: list[int], budget: int, ranks: int) -> None:
    sizes = np.array(lengths)
    groups = packed_groups(sizes, budget)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(int(sizes[group].sum()) <= max(budget, int(sizes.max())) for group in groups)
    shares = split_step(list(range(len(lengths))), sizes, budget, ranks, packing=True)
    assert len({len(share) for share in shares}) == 1
    assert sorted(i for share in shares for micro in share if micro.counts for i in micro.indices) == sorted(
        range(len(lengths))
    )


def test_packed_and_padded_runs_learn_the_same(world: Path, launch: Launch) -> None:
    """Cached and online: the same losses as without packing."""
    double = ("--target.dtype", "float64", "--data.feature_dtype", "float64", "--eval.prompts", 0, "--train.bucket", 1)
    launch(*double, "--output.folder", world / "padded")
    launch(*double, "--train.packing", "true", "--output.folder", world / "packed")
    launch(*double, "--train.packing", "true", "--data.features", "online", "--output.folder", world / "online")
    padded = list(losses(world / "padded").values())
    assert len(padded) == 6
    for folder in ("packed", "online"):
        assert list(losses(world / folder).values()) == pytest.approx(padded, rel=1e-9)
