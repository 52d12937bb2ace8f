"""Certificates: a right decoder passes, each planted fault is refused, near-ties are told from errors."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from heads.draft import Draft
from heads.grow import Budget, Sampler
from heads.target import Target
from infer import law
from infer.cache import ForgettingCache
from infer.certify import Plan, certify, greedy_identity, sampled_law, table
from infer.drafters import Drafter
from infer.evaluate import Question
from infer.law import ChiSquare, Observed, Sampling, compare, expected_law, sample_rounds
from infer.remembering import Remembering
from infer.rounding import first_difference, logit_noise
from tests.infer.oracles import Oracle, greedy_text
from tests.tiny import tiny_model

IDS = torch.tensor([[3, 9, 27, 17]])
ONE = [Question("1", "a", IDS)]
CHAIN, TREE = Budget.chain(3), Budget.static(((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (1, 1, 0), (1, 1, 1)))


def sampling_of(draws: int, top_k: int = 6) -> Sampling:
    """Of toys, whose every token counts."""
    return Sampling(draws, temperature=1.0, top_k=top_k, top_p=None)


class Opposed:
    """Drafts against the target: its own distribution upside down, over the ``top_k`` tokens and a few more."""

    taps: tuple[int, ...] = ()
    lookahead = 2
    module_seconds = 0.0

    def __init__(self) -> None:
        self.text = torch.empty(0)

    def begin(self, target: Target, ids: Tensor, taps: Tensor | None) -> None:
        self.target, self.text = target, ids

    def commit(self, taps: Tensor | None, ids: list[int]) -> None:
        self.text = torch.cat([self.text, torch.tensor([ids])], 1)

    def fork(self) -> Opposed:
        return Opposed()

    def logits(self, more: Sequence[int]) -> Tensor:
        ids = torch.cat([self.text, torch.tensor([list(more)], dtype=torch.long)], 1)
        best = self.target.model(ids).logits[0, -1].topk(8)
        upside_down = torch.full((self.target.vocab_size,), -30.0)
        upside_down[best.indices] = -0.5 * (best.values - best.values.max()).float()
        return upside_down

    def propose(self, budget: Budget, sampler: Sampler | None) -> Draft:
        tokens: list[int] = []
        qs: list[Tensor | None] = []
        if sampler is None:
            return Draft(tuple(self.logits([]).topk(2).indices.tolist()), (-1, -1), (None, None))
        for _ in range(budget.depth):
            token, q = sampler(self.logits(tokens))
            tokens.append(token)
            qs.append(q)
        return Draft.chain(tokens, qs)


def small(dtype: torch.dtype = torch.float64) -> Target:
    return Target(tiny_model("llama", dtype=dtype, layers=2))


def plan(**changes: object) -> Plan:
    settings: dict = {
        "budgets": {"chain": CHAIN, "tree": TREE},
        "law_budgets": {"chain": Budget.chain(2), "tree": Budget(3, 1, 2)},
    }
    settings |= {
        "dtypes": (torch.float32, torch.bfloat16),
        "max_new_tokens": 24,
        "sampling": sampling_of(200),
    }
    return Plan(**(settings | changes))


class Patchy(Oracle):
    """Right at rank 1 of every node: accepted nodes lie scattered, so the cache must be closed up."""

    def __init__(self, text: Tensor) -> None:
        super().__init__(text, lookahead=3, rank=1)


def test_a_right_decoder_is_certified_and_the_wrong_rule_refused() -> None:
    def load(dtype: torch.dtype) -> tuple[Target, Drafter]:
        target = small(dtype)
        return target, Opposed()

    certificate = certify(load, ONE, [IDS], plan())
    assert certificate["passed"]
    assert certificate["greedy"]["float32"]["identical"]
    assert certificate["sampled"]["enough_rejections"]
    assert certificate["sampled"]["control"]["failed_as_it_must"]
    assert len(certificate["target"]["sha256"]) == 64
    json.dumps(certificate)
    assert "CERTIFIED" in table(certificate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_that_is_not_closed_up_is_beyond_any_rounding(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    target = small(dtype)
    drafter = Patchy(greedy_text(target, IDS, 40))
    healthy = greedy_identity(target, drafter, ONE, plan())
    assert healthy["passed"]
    keep = ForgettingCache.keep
    monkeypatch.setattr(
        ForgettingCache, "keep", lambda self, base, paths: keep(self, base, [list(range(len(path))) for path in paths])
    )
    broken = greedy_identity(target, drafter, ONE, plan())
    assert not broken["passed"]
    assert max(row["gap"] for row in broken["differences"]) > broken["bound"]
    assert broken["bound"] == (healthy["bound"] if dtype == torch.bfloat16 else 1e-4)


def test_a_text_that_ends_too_soon_is_no_near_tie() -> None:
    target = small()
    difference = first_difference(target, IDS, [5, 6], [5, 6, 7])
    assert difference is not None
    assert (difference.position, difference.ours, difference.theirs) == (2, None, 7)
    assert difference.gap == float("inf")
    assert difference.to_dict()["gap"] is None
    assert first_difference(target, IDS, [5, 6], [5, 6]) is None


def test_a_difference_is_rescored_in_the_targets_own_logits() -> None:
    target = small()
    logits = target.model(torch.cat([IDS, torch.tensor([[5]])], 1)).logits[0, -1]
    difference = first_difference(target, IDS, [5, 6, 1], [5, 7, 1])
    assert difference is not None
    assert difference.gap == pytest.approx(abs((logits[6] - logits[7]).item()), rel=1e-9)


def test_rounding_noise_is_far_smaller_where_numbers_are_finer() -> None:
    models = {dtype: Target(tiny_model("llama", dtype=dtype, layers=6)) for dtype in (torch.bfloat16, torch.float32)}
    texts = [(IDS, greedy_text(models[torch.float32], IDS, 60)[0, 4:].tolist())]
    half, full = (logit_noise(model, texts, 8) for model in models.values())
    assert half > 1e-3 > 1e-4 > full > 0
    with pytest.raises(ValueError, match="empty"):
        logit_noise(small(), [(IDS, [])], 8)


MUTANTS = {
    "residual of the target": law.residual_from_target,
    "accepts whatever was drafted": lambda draft, at, chooser: law.Verdict(
        list(range(len(draft))), chooser.sample(at.p(len(draft) - 1))
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_wrong_rules_leave_the_law(name: str) -> None:
    target, sampling = small(), sampling_of(300)
    observed = sample_rounds(target, Opposed(), IDS, Budget.chain(2), sampling, MUTANTS[name])
    expected = expected_law(target, IDS, list(observed.counts), sampling)
    assert not compare(observed, expected, 1).passed


def test_a_control_that_is_not_refused_voids_the_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that cannot see the wrong rule proves nothing about the right one."""
    from infer import certify as module
    from infer.verify import token

    monkeypatch.setattr(module, "residual_from_target", token)
    block = sampled_law(small(), Opposed(), [IDS], plan(law_budgets={"chain": Budget.chain(2)}))
    assert not block["passed"]
    assert all(draft["passed"] for draft in block["drafts"].values())


def test_the_prompts_taken_are_those_at_which_the_control_shows_most() -> None:
    """Behind each prompt the control is decoded: the statistic is largest for the prompt that was put first."""
    target, sampling = small(), sampling_of(150)
    prompts = [torch.tensor([[n, 9, 27, 17]]) for n in range(6)]
    ordered = law.most_telling(target, Opposed(), prompts, 6, sampling)
    assert len(ordered) == 6
    ends = []
    for prompt in (ordered[0], ordered[-1]):
        seen = sample_rounds(target, Opposed(), prompt, Budget.chain(1), sampling, law.residual_from_target)
        ends.append(compare(seen, expected_law(target, prompt, list(seen.counts), sampling), 1).statistic)
    assert ends[0] > 2 * ends[1]


def test_all_draws_go_on_from_the_likeliest_token() -> None:
    target = small()
    seen = sample_rounds(target, Opposed(), IDS, Budget.chain(1), sampling_of(5))
    best = int(target.model(IDS).logits[0, -1].argmax())
    assert seen.counts[()] == Counter({best: 5})
    assert seen.counts[(best,)].total() == 5


def test_the_expected_law_is_the_filtered_softmax() -> None:
    target, sampling = small(), Sampling(top_k=3, temperature=0.5, top_p=None)
    p = expected_law(target, IDS, [(), (5,)], sampling)[(5,)]
    logits = target.model(torch.cat([IDS, torch.tensor([[5]])], 1)).logits[0, -1].float()
    top = logits.topk(3)
    assert torch.allclose(p[top.indices], (top.values / 0.5).softmax(-1).double(), atol=1e-6)
    assert int((p > 0).sum()) == 3


def test_a_remembered_pass_is_the_pass() -> None:
    """Prefill, then a tree, then another tree, again and again: logits and what stands in the cache, bit for bit."""
    target = small()
    once = Remembering(target, passes=3)
    trees = [
        torch.tensor([[True, False, False], [True, True, False], [True, second, True]]) for second in (True, False)
    ]
    passes = 0
    forward = target.model.forward

    def count(*args: object, **kwargs: object) -> object:
        nonlocal passes
        passes += 1
        return forward(*args, **kwargs)

    target.model.forward = count
    for tree in (*trees, *trees):
        caches = [ForgettingCache(target), ForgettingCache(target)]
        for source, cache in zip((target, once), caches, strict=True):
            source.forward(IDS, cache=cache, positions=torch.arange(4)[None])
        mask = torch.cat([torch.ones(3, 4, dtype=torch.bool), tree], 1)[None, None]
        positions = torch.tensor([[4, 5, 6 if bool(tree[2, 1]) else 5]])
        ids = torch.tensor([[7, 8, 9]])
        plain, remembered = (
            source.forward(ids, cache=cache, mask=mask, positions=positions)
            for source, cache in zip((target, once), caches, strict=True)
        )
        assert torch.equal(plain.logits, remembered.logits)
        for ours, theirs in zip(caches[0].forgetting, caches[1].forgetting, strict=True):
            assert ours.store is not None and theirs.store is not None
            assert all(torch.equal(a, b) for a, b in zip(ours.store.view(), theirs.store.view(), strict=True))
    assert passes == 8 + 3, "the target runs every pass, the one that remembers runs three"


def observed(counts: dict[tuple[int, ...], dict[int, int]]) -> Observed:
    return Observed({context: Counter(tokens) for context, tokens in counts.items()})


def test_chi_square_by_hand() -> None:
    p = torch.tensor([0.5, 0.25, 0.25, 0.0])
    test = compare(observed({(): {0: 60, 1: 20, 2: 20}}), {(): p}, 0)
    assert test.statistic == pytest.approx(100 / 50 + 25 / 25 + 25 / 25)
    assert (test.df, test.draws, test.impossible) == (2, 100, 0)
    assert test.limit == pytest.approx(2 + 10 * 2)
    assert test.passed


def test_small_bins_are_merged_and_impossible_tokens_fail() -> None:
    p = torch.tensor([0.9, 0.04, 0.04, 0.02, 0.0])
    test = compare(observed({(): {0: 90, 1: 4, 2: 4, 3: 2}}), {(): p}, 0)
    assert test.df == 1 and test.statistic == pytest.approx(0.0, abs=1e-9)
    assert not compare(observed({(): {0: 99, 4: 1}}), {(): p}, 0).passed
    few = compare(observed({(1,): {0: 3}}), {(1,): p}, 1)
    assert few == ChiSquare(0.0, 0, 3)
    assert few.passed


def test_contexts_add_up() -> None:
    p = torch.tensor([0.5, 0.5])
    both = compare(observed({(0,): {0: 60, 1: 40}, (1,): {0: 45, 1: 55}, (): {0: 1}}), {(0,): p, (1,): p, (): p}, 1)
    assert (both.df, both.draws) == (2, 200)
    assert both.statistic == pytest.approx(4.0 + 1.0)


def test_no_prompt_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one prompt"):
        certify(lambda dtype: (small(dtype), Opposed()), [], [IDS], plan())
