"""The output's law, computed over every branch and compared with the target's own; planted bugs must show.

``lawful`` enumerates whole decodes: drafting, acceptance, residuals, several rounds, the cache in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from heads.draft import Draft
from heads.grow import Budget
from infer import verify
from infer.decode import Decoding
from infer.drafters import Drafter
from infer.stopping import Stop
from tests.infer.fakes import (
    Branching,
    Chosen,
    OneNumber,
    Sampled,
    TableTarget,
    enumerate_law,
    table,
    zero_only_drafted,
)

PROMPT = (0, 1)
P, Q = [0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]
MakeDrafter = Callable[[Branching], Drafter]


def target_law(
    logits_after: Callable[[tuple[int, ...]], Tensor], vocab: int, length: int
) -> dict[tuple[int, ...], float]:
    """Law of ``length`` new tokens sampled from the table, one by one."""
    law = {}
    for text in product(range(vocab), repeat=length):
        weight = 1.0
        for at, token in enumerate(text):
            scores = logits_after((*PROMPT, *text[:at])).float()  # as transformers hands scores on
            weight *= float(scores.softmax(-1, dtype=torch.float64)[token])
        law[text] = weight
    return law


def decoded_law(
    logits_after: Callable[[tuple[int, ...]], Tensor],
    vocab: int,
    length: int,
    depth: int,
    make: MakeDrafter,
    rule: verify.Rule | None = None,
) -> tuple[dict[tuple[int, ...], float], float]:
    """Law of the loop's output, and the expected share of drafting rounds that end in a rejection."""
    rejected, drafted = 0.0, 0.0

    def run(chooser: Branching) -> tuple[int, ...]:
        nonlocal rejected, drafted
        target = TableTarget(logits_after, vocab)
        decoding = Decoding(
            target=target,  # type: ignore[arg-type]
            ids=torch.tensor([PROMPT]),
            drafter=make(chooser),
            budget=Budget(rows=16, depth=depth),
            stop=Stop(len(PROMPT) + length),
            do_sample=True,
            rule=rule,
            chooser=chooser,
        )
        text = tuple(token for tokens in decoding.run() for token in tokens)
        assert len(text) == length
        for r in decoding.stats.log:
            drafted += chooser.weight * (r.depth > 0)
            rejected += chooser.weight * (r.accepted < min(r.depth, r.emitted))
        return text

    law = enumerate_law(run)
    return law, rejected / drafted if drafted else 0.0


def assert_lawful(
    make: MakeDrafter,
    *,
    vocab: int = 3,
    length: int = 4,
    depth: int = 2,
    seed: int = 0,
    rule: verify.Rule | None = None,
) -> float:
    """Compare to 1e-12; returns the share of rejections."""
    logits_after = table(vocab, seed)
    ours, rejections = decoded_law(logits_after, vocab, length, depth, make, rule)
    theirs = target_law(logits_after, vocab, length)
    worst = max(abs(ours.get(text, 0.0) - weight) for text, weight in theirs.items())
    assert worst <= 1e-12, f"largest difference of a probability: {worst}"
    assert sum(ours.values()) == pytest.approx(1.0, abs=1e-12)
    return rejections


def opposing(vocab: int, seed: int = 0) -> MakeDrafter:
    """Draws from what the target finds unlikely, over its whole vocabulary."""
    logits_after = table(vocab, seed)
    return lambda chooser: Sampled(lambda prefix: (-logits_after(prefix)).softmax(-1), chooser)


def draft_tree(*nodes: tuple[int, int]) -> Draft:
    """A chosen tree of (token, parent) pairs."""
    tokens, parents = zip(*nodes, strict=True)
    return Draft(tokens, parents, (None,) * len(nodes))


@pytest.mark.parametrize("rule", [None, verify.token, verify.traversal])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("depth", [1, 2])
def test_sampled_chains_keep_the_law(depth: int, seed: int, rule: verify.Rule | None) -> None:
    assert assert_lawful(opposing(3, seed), depth=depth, seed=seed, rule=rule) >= 0.3


def test_a_sampled_chain_of_three_keeps_the_law() -> None:
    assert assert_lawful(opposing(3), length=4, depth=3) >= 0.3


def test_a_draft_that_agrees_keeps_the_law_too() -> None:
    logits_after = table(3, 0)
    rejections = assert_lawful(lambda chooser: Sampled(lambda prefix: logits_after(prefix).softmax(-1), chooser))
    assert rejections < 1e-6  # q is float32, p float64


TREES = {
    "chain": draft_tree((0, -1), (1, 0), (2, 1)),
    "siblings": draft_tree((2, -1), (0, -1)),
    "bushy": draft_tree((0, -1), (1, -1), (2, 0), (0, 0), (1, 1), (0, 3)),
    "all children": draft_tree((2, -1), (1, -1), (0, -1), (0, 2), (1, 2), (2, 2)),
}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("seed", range(2))
def test_chosen_trees_keep_the_law(name: str, seed: int) -> None:
    rejections = assert_lawful(lambda chooser: Chosen(TREES[name]), depth=3, seed=seed)
    assert rejections >= (0.2 if name == "all children" else 0.3)  # there the first level cannot reject


@pytest.mark.parametrize("rule", [verify.token, verify.traversal])
def test_other_rules_keep_the_law_of_chosen_trees(rule: verify.Rule) -> None:
    for tree in TREES.values():
        assert_lawful(lambda chooser, tree=tree: Chosen(tree), depth=3, rule=rule)  # type: ignore[misc]


class Merged(Sampled):
    """One tree of two drafters: siblings drawn without replacement, a chosen one behind them, a drawn child below."""

    def draft(self, budget: Budget, sampler: object) -> Draft:
        first = self.q_after(tuple(self.text)).float()
        x = self.chooser.sample(first)
        second = first.clone()
        second[x] = 0
        second /= second.sum()
        y = self.chooser.sample(second)
        below = self.q_after((*self.text, x)).float()
        z = self.chooser.sample(below)
        chosen = (x + y) % 3  # depends on what was drawn; given that, it is certain
        return Draft((x, y, chosen, z), (-1, -1, -1, 0), (first, second, None, below))


@pytest.mark.parametrize("rule", [None, verify.token])
def test_merged_trees_keep_the_law(rule: verify.Rule | None) -> None:
    logits_after = table(3, 0)
    assert_lawful(
        lambda chooser: Merged(lambda prefix: (-logits_after(prefix)).softmax(-1), chooser), length=3, rule=rule
    )


def test_a_reduced_draft_vocabulary_keeps_every_other_token() -> None:
    """Tokens the draft cannot name keep their probability."""
    logits_after = table(6, 5)
    ids = torch.tensor([1, 3, 5])
    make = lambda chooser: Sampled(lambda prefix: (-logits_after(prefix)[ids]).softmax(-1), chooser, ids)  # noqa: E731
    assert assert_lawful(make, vocab=6, length=3, depth=1, seed=5) >= 0.3
    p = torch.tensor([0.05, 0.1, 0.15, 0.2, 0.2, 0.3], dtype=torch.float64)
    assert one_round(p, torch.tensor([0.6, 0.3, 0.1]), ids=ids) == pytest.approx(p.tolist(), abs=1e-12)


# One token, p and q opposed, with the wrong laws that known bugs give


class Fixed:
    """The same distribution at every node."""

    foresight = True

    def __init__(self, p: Tensor) -> None:
        self._p = p

    def p(self, node: int) -> Tensor:
        return self._p

    peek = p

    def best(self, node: int) -> int:
        return int(self._p.argmax())

    def settle(self, path: Sequence[int]) -> None:
        pass


def one_round(
    p: Tensor,
    q: Tensor,
    *,
    ids: Tensor | None = None,
    draw: bool = True,
    tell: bool = True,
    rule: verify.Rule | None = None,
) -> list[float]:
    """Law of the first token after one drafted one, drawn from q (or q's arg-max), with or without telling q."""

    def run(chooser: Branching) -> int:
        place = chooser.sample(q) if draw else int(q.argmax())
        token = place if ids is None else int(ids[place])
        draft = Draft.chain([token], [q if tell else None], ids)
        path, last = (rule or verify.choose_rule(draft, True))(draft, Fixed(p), chooser)
        return token if path else last

    law = enumerate_law(run)
    return [law.get(token, 0.0) for token in range(len(p))]


p_, q_ = torch.tensor(P, dtype=torch.float64), torch.tensor(Q)


@pytest.mark.parametrize("rule", [verify.token, verify.block, verify.traversal])
def test_rejection_gives_p(rule: verify.Rule) -> None:
    assert one_round(p_, q_, rule=rule) == pytest.approx(P, abs=1e-12)
    assert one_round(p_, q_, draw=False, tell=False) == pytest.approx(P, abs=1e-12)  # arg-max draft, one-hot q
    assert one_round(p_, q_, draw=False, tell=False, rule=rule) == pytest.approx(P, abs=1e-12)


def test_an_arg_max_draft_with_the_softmax_as_q_is_seen() -> None:
    assert one_round(p_, q_, draw=False, tell=True) == pytest.approx([0.25, 0, 0.1875, 0.5625], abs=1e-6)


def test_a_residual_that_only_zeroes_the_drafted_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    zero_only_drafted(monkeypatch)
    assert one_round(p_, q_, rule=verify.token) == pytest.approx([0.1125, 0.26667, 0.3375, 0.28333], abs=1e-4)


def test_a_residual_drawn_from_p_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "residual", lambda p, q: (p, 1.0))
    assert one_round(p_, q_, rule=verify.token) == pytest.approx([0.14, 0.28, 0.32, 0.26], abs=1e-6)


# three named mutants: each makes the law test above fail


def test_mutant_wrong_residual_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    zero_only_drafted(monkeypatch)
    with pytest.raises(AssertionError, match="largest difference"):
        assert_lawful(opposing(3), length=3, rule=verify.token)


def test_mutant_wrong_q_fails() -> None:
    """q before the temperature it was drawn at."""
    logits_after = table(3, 0)

    class Untempered(Sampled):
        def draft(self, budget: Budget, sampler: object) -> Draft:
            honest = super().draft(budget, None)
            told = [self.q_after((*self.text, *honest.tokens[:i])).float().sqrt() for i in range(len(honest))]
            return Draft.chain(honest.tokens, [q / q.sum() for q in told])

    with pytest.raises(AssertionError, match="largest difference"):
        assert_lawful(lambda chooser: Untempered(lambda prefix: (-logits_after(prefix)).softmax(-1), chooser))


def test_mutant_reused_random_numbers_fails() -> None:
    """Over a grid of numbers; the same rule with fresh numbers passes in ``test_sampling``."""
    counts = [0] * 4
    for k in range(2000):
        chooser = OneNumber((k + 0.5) / 2000)
        draft = Draft.chain([chooser.sample(q_)], [q_])
        path, last = verify.token(draft, Fixed(p_), chooser)
        counts[draft.tokens[0] if path else last] += 1
    assert sum(abs(count / 2000 - p) for count, p in zip(counts, P, strict=True)) / 2 > 0.05
