"""How drafts are judged: loss, gradient, counts and acceptance against plain loops and numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import heads.chunked as chunked
from heads.base import DraftHeads, LossReport
from heads.judge import Teacher, TrainingBatch, UnrollStep
from tests.heads.scripted import Scripted, batch_from
from tests.heads.small import batch_of, number, random_ids, small_heads, small_target, soft_ce


def plain(heads: DraftHeads, batch: TrainingBatch) -> LossReport:
    """The report as one would write it down: one row and one position after another."""
    steps = list(heads.unroll(batch))
    k, length = len(steps), batch.ids.shape[1]
    ids = torch.arange(heads.config.vocab_size) if heads.draft_ids is None else heads.draft_ids
    total, terms, counts = torch.zeros((), dtype=torch.float64), torch.zeros(k), torch.zeros(k, dtype=torch.long)
    accepted, overlap = torch.zeros(k, dtype=torch.long), torch.zeros(k, dtype=torch.float64)
    alive = torch.ones(len(steps[0].row), dtype=torch.bool)
    for j, step in enumerate(steps):
        for n, (b, row) in enumerate(zip(step.batch.tolist(), step.row.tolist(), strict=True)):
            if row + 2 + j >= length or not batch.loss_mask[b, row + 2 + j]:
                alive[n] = False
                continue
            said = heads.target.project_rows(batch.hidden[b, row + 1 + j], None).double()
            p, log_q = said.softmax(-1), step.logits[n].double().log_softmax(-1)
            loss = -(p[ids] / p[ids].sum() * log_q).sum()
            total = total + heads.position_weights()[j] * loss
            terms[j] += loss.detach()
            counts[j] += 1
            alive[n] &= ids[log_q.argmax()] == p.argmax()
            accepted[j] += alive[n]
            overlap[j] += torch.minimum(p[ids], log_q.exp()).sum().detach()
    return LossReport(total, counts[0].float(), {"soft_ce": terms}, counts, accepted, overlap)


def assert_same(ours: LossReport, theirs: LossReport, bound: float = 1e-12) -> None:
    assert torch.equal(ours.counts, theirs.counts) and torch.equal(ours.accepted, theirs.accepted)
    assert float(ours.count) == float(theirs.count)
    assert number(ours.total) == pytest.approx(number(theirs.total), rel=bound, abs=bound)
    assert ours.overlap.tolist() == pytest.approx(theirs.overlap.tolist(), rel=bound, abs=1e-9)
    assert ours.terms.keys() == theirs.terms.keys()
    for name, values in ours.terms.items():
        assert values.tolist() == pytest.approx(theirs.terms[name].tolist(), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("chunk", [1, 40, 150, 1 << 19])
@pytest.mark.parametrize("draft_vocab", [None, 11])
@pytest.mark.parametrize("kind", ["medusa", "eagle", "block"])
def test_loss_and_gradient_equal_plain_autograd(
    kind: str, draft_vocab: int | None, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(chunked.CHUNK_ENTRIES, "cpu", chunk)
    monkeypatch.setattr(chunked, "PASS_ENTRIES", 2 * chunk)
    monkeypatch.setattr(chunked, "PASS_ROWS", 3)
    target = small_target()
    heads = small_heads(kind, target, lookahead=3, draft_vocab=draft_vocab)
    masks = random_ids(14, rows=3, seed=5, vocab=2).bool()
    batch = batch_of(target, heads.config.taps, random_ids(14, rows=3), masks)
    batch.lse = batch.lse.double()  # so that float64 is float64 to the end
    ours, theirs = heads.loss(batch, soft_ce), plain(heads, batch)
    assert_same(ours, theirs)
    parameters = dict(heads.named_parameters())
    mine = torch.autograd.grad(ours.total, list(parameters.values()))
    right = torch.autograd.grad(theirs.total, list(parameters.values()))
    for name, got, wanted in zip(parameters, mine, right, strict=True):
        assert torch.allclose(got, wanted, rtol=1e-12, atol=1e-12 * float(wanted.abs().max())), name


def test_the_gradient_is_scaled_by_what_stands_behind_the_loss() -> None:
    target = small_target()
    heads = small_heads("medusa", target)
    batch = batch_of(target, heads.config.taps, random_ids(9))
    parameters = list(heads.parameters())
    whole = torch.autograd.grad(heads.loss(batch, soft_ce).total, parameters)
    third = torch.autograd.grad(heads.loss(batch, soft_ce).total / 3, parameters)
    for one, three in zip(third, whole, strict=True):
        assert torch.allclose(one * 3, three, rtol=1e-12)
    with torch.no_grad():
        assert not heads.loss(batch, soft_ce).total.requires_grad  # and evaluation needs no graph


def test_a_small_example_by_hand() -> None:
    """Three tokens, one text of five, all trained: rows 0, 1, 2 at position 0; rows 0, 1 at position 1."""
    p = torch.tensor([[0.0, 0, 1], [0.5, 0.3, 0.2], [0.2, 0.7, 0.1], [0.1, 0.1, 0.8], [0.6, 0.2, 0.2]])
    never = [1 / 3] * 3  # what stands here is not judged
    first, second = [0.5, 0.25, 0.25], [[0.1, 0.8, 0.1], [0.25, 0.25, 0.5]]
    q = torch.tensor([[first, first, first, never, never], [*second, never, never, never]], dtype=torch.float64)
    batch = batch_from(p.double().clamp_min(1e-9).log()[None], torch.ones(1, 5, dtype=torch.bool))
    heads = Scripted(q.log()[:, None], 3, decay=0.5)
    report = heads.loss(batch, soft_ce)
    # position 0: row i is judged by p[i + 1], whose arg-maxes are 0, 1, 2; all rows draft 0
    # position 1: row i by p[i + 2]; both draft what is right, but row 1 was already lost
    assert report.counts.tolist() == [3, 2] and float(report.count) == 3
    assert report.accepted.tolist() == [1, 1]
    overlaps = [(0.5 + 0.25 + 0.2) + (0.2 + 0.25 + 0.1) + (0.1 + 0.1 + 0.25), (0.1 + 0.7 + 0.1) + (0.1 + 0.1 + 0.5)]
    assert report.overlap.tolist() == pytest.approx(overlaps, abs=1e-6)
    half, quarter, tenth, most = (math.log(share) for share in (0.5, 0.25, 0.1, 0.8))
    at_0 = -(0.5 * half + 0.5 * quarter) - (0.2 * half + 0.8 * quarter) - (0.1 * half + 0.9 * quarter)
    at_1 = -(0.7 * most + 0.3 * tenth) - (0.8 * half + 0.2 * quarter)
    assert report.terms["soft_ce"].tolist() == pytest.approx([at_0, at_1], abs=1e-6)
    assert number(report.total) == pytest.approx(at_0 + 0.5 * at_1, abs=1e-6)
    assert heads.position_weights() == [1, 0.5]


def test_acceptance_over_a_draft_vocabulary_counts_what_it_lacks() -> None:
    """Overlap takes p over the whole vocabulary; the arg-max of a token that cannot be drafted is never hit."""
    p = torch.tensor([0.4, 0.0, 0.3, 0.0, 0.0, 0.2, 0.0, 0.1], dtype=torch.float64).clamp_min(1e-12)
    logits = p.log().expand(1, 3, 8).clone()
    logits[0, 1, 0] = p[0].log()
    ids = torch.tensor([2, 5, 7])
    q = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log().expand(1, 1, 3, 3).clone()
    report = Scripted(q, 8, ids).loss(batch_from(logits, torch.ones(1, 3, dtype=torch.bool)), soft_ce)
    assert report.counts.tolist() == [1]
    assert report.accepted.tolist() == [0]
    assert float(report.overlap) == pytest.approx(0.3 + 0.2 + 0.1, abs=1e-6)
    wanted = -(0.5 * torch.tensor(0.5).log() + 0.5 * torch.tensor(0.25).log())  # p renormalised is ½, ⅓, ⅙
    assert number(report.total) == pytest.approx(float(wanted), abs=1e-6)
    logits[..., 0] = -30  # now 2 is the likeliest of all
    assert Scripted(q, 8, ids).loss(
        batch_from(logits, torch.ones(1, 3, dtype=torch.bool)), soft_ce
    ).accepted.tolist() == [1]


def recorded(mask: list[int], lookahead: int, kind: str) -> list[set[int]]:
    """For each draft position the places of the tokens that were judged, told by the teacher's logits."""
    target = small_target()
    heads = small_heads(kind, target, lookahead=lookahead)
    batch = batch_of(target, heads.config.taps, random_ids(len(mask)), torch.tensor([mask], dtype=torch.bool))
    logits = target.project(batch.hidden)[0]
    found: list[set[int]] = []

    def criterion(draft: Tensor, teacher: Teacher) -> dict[str, Tensor]:
        said = (teacher.logits[:, None] - logits[None]).abs().amax(-1).argmin(1)
        found.append({int(place) + 1 for place in said})  # position t says token t + 1
        assert len(said) == len(found[-1])
        return soft_ce(draft, teacher)

    report = heads.loss(batch, criterion)
    assert report.counts.tolist() == [len(places) for places in found]
    assert float(report.count) == float(heads.count(batch.loss_mask)) == report.counts[0]
    return found


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_exactly_the_tokens_that_the_target_says_are_judged(kind: str) -> None:
    # rows 0 and 1 draft 2, 3 | 3, 4 | 4, 5 …: a row counts at a position where that token is the target's own
    assert recorded([0, 0, 0, 1, 1, 0], 3, kind) == [{3, 4}, {4}, set()]
    assert recorded([1, 1, 1, 1, 1, 1], 2, kind) == [{2, 3, 4, 5}, {3, 4, 5}]
    # two turns: rows 0, 1 and 5, 6, 7 have an own token two places on
    assert recorded([0, 0, 1, 1, 0, 0, 0, 1, 1, 1], 3, kind) == [{2, 3, 7, 8, 9}, {3, 8, 9}, {9}]
    # the first answer token of a text has no row to draft it from when nothing stands before it
    assert recorded([1, 1, 0, 0], 2, kind) == [set(), set()]
    assert recorded([0, 0], 2, kind) == [set(), set()]


def test_a_batch_without_anything_to_learn_is_a_zero_not_a_nan() -> None:
    target = small_target()
    for kind in ("medusa", "eagle"):
        heads = small_heads(kind, target)
        batch = batch_of(target, heads.config.taps, random_ids(6, rows=2), torch.zeros(2, 6, dtype=torch.bool))
        report = heads.loss(batch, soft_ce)
        assert number(report.total) == 0 and float(report.count) == 0 and report.counts.tolist() == [0, 0, 0]
        assert set(report.terms) == {"soft_ce"} and report.terms["soft_ce"].tolist() == [0, 0, 0]
        report.total.backward()
        assert all(p.grad is None or bool((p.grad == 0).all()) for p in heads.parameters())


def test_without_measuring_the_loss_is_the_same() -> None:
    target = small_target()
    heads = small_heads("eagle", target)
    batch = batch_of(target, heads.config.taps, random_ids(12))
    with_it, without = heads.loss(batch, soft_ce), heads.loss(batch, soft_ce, measure=False)
    assert number(with_it.total) == number(without.total) and torch.equal(with_it.counts, without.counts)
    assert float(with_it.overlap.sum()) > 0
    assert without.accepted.tolist() == [0, 0, 0] and without.overlap.tolist() == [0, 0, 0]


def test_several_terms_are_summed_and_named() -> None:
    target = small_target()
    heads = small_heads("medusa", target)
    batch = batch_of(target, heads.config.taps, random_ids(8))

    def criterion(draft: Tensor, teacher: Teacher) -> dict[str, Tensor]:
        soft = soft_ce(draft, teacher)["soft_ce"]
        # the teacher's own figures are there for terms that need p over the whole vocabulary
        assert torch.allclose(teacher.logits.logsumexp(-1), teacher.lse)
        return {"soft": soft, "twice": 2 * soft}

    one, both = heads.loss(batch, soft_ce), heads.loss(batch, criterion)
    assert number(both.total) == pytest.approx(3 * number(one.total), rel=1e-12)
    assert torch.allclose(both.terms["twice"], 2 * both.terms["soft"])
    assert torch.allclose(both.terms["soft"], one.terms["soft_ce"])


def test_terms_of_the_heads_own_count_where_a_teacher_does() -> None:
    """By position weight, and for counted rows only."""
    own = torch.nn.Parameter(torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64))

    class WithTerms(Scripted):
        def unroll(self, batch: TrainingBatch) -> Iterator[UnrollStep]:
            for step in super().unroll(batch):
                step.terms = {"own": own}
                yield step

    heads = WithTerms(torch.zeros(2, 1, 5, 4, dtype=torch.float64), 4, decay=0.5)
    mask = torch.ones(1, 5, dtype=torch.bool)
    report = heads.loss(batch_from(torch.zeros(1, 5, 4, dtype=torch.float64), mask), soft_ce)
    assert report.counts.tolist() == [3, 2]
    assert report.terms["own"].tolist() == [111, 11]
    assert number(report.total) == pytest.approx(111 + 0.5 * 11 + (3 + 0.5 * 2) * math.log(4))
    report.total.backward()
    assert own.grad is not None and own.grad.tolist() == [1.5, 1.5, 1.0]
