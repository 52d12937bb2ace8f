"""Every rule over every kind of draft: the joint law of several rounds, by enumeration; planted bugs must show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import infer.block
import infer.traversal
from heads.draft import Draft
from heads.grow import Budget
from infer import verify
from infer.rule import residual
from infer.verify import RULES, At, Chooser, Rule, Verdict
from tests.infer.exact import (
    Make,
    World,
    check_law,
    completed,
    distance,
    drafts_of,
    grown,
    reusing,
    round_of,
    target_law,
)
from tests.infer.mixed import chosen_first, chosen_last, mixed_chain, told

STATIC: dict[str, list[tuple[int, ...]]] = {
    "pair": [(0,), (1,)],
    "triple": [(0,), (1,), (2,)],
    "fork": [(0,), (1,), (0, 0), (1, 0)],
    "stem": [(0,), (0, 0), (0, 1), (0, 2)],
    "full": [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)],
    "deep": [(0,), (1,), (0, 0), (1, 0), (0, 0, 0)],
    "spent": [(0,), (1,), (2,), (3,), (0, 0), (2, 0)],  # four children of three tokens
}


def static(name: str) -> Budget:
    return Budget.static(STATIC[name])


def drawn(budget: Budget) -> Callable[[World], Make]:
    return lambda world: grown(world, budget)


def narrow(budget: Budget, *ids: int) -> Callable[[World], Make]:
    """A draft vocabulary of these tokens."""
    return lambda world: grown(world, budget, ids=torch.tensor(ids))


# draft → how it is made, the vocabulary, the tokens looked at
SAMPLED_CHAINS = {
    "chain 1": (drawn(Budget.chain(1)), 5, 3),
    "chain 2": (drawn(Budget.chain(2)), 4, 4),
    "chain 3": (drawn(Budget.chain(3)), 3, 5),
    "chain 2, narrow": (narrow(Budget.chain(2), 1, 3), 4, 4),
    "mixed chain": (mixed_chain, 3, 5),
}
SAMPLED_TREES = {
    "pair": (drawn(static("pair")), 5, 3),
    "triple": (drawn(static("triple")), 5, 3),
    "fork": (drawn(static("fork")), 3, 4),
    "stem": (drawn(static("stem")), 4, 4),
    "deep": (drawn(static("deep")), 3, 4),
    "spent": (drawn(static("spent")), 3, 4),
    "by confidence": (drawn(Budget(rows=5, depth=3, width=2)), 3, 4),
    "fork, narrow": (narrow(static("fork"), 0, 2), 4, 4),
    "chosen first": (chosen_first, 4, 4),
    "chosen last": (chosen_last, 3, 4),
}
CHOSEN = {
    "chain 1": (Budget.chain(1), 5, 3),
    "chain 3": (Budget.chain(3), 3, 5),
    "pair": (static("pair"), 5, 3),
    "full": (static("full"), 4, 4),
    "by confidence": (Budget(rows=7, depth=3, width=2), 4, 5),
}


@pytest.mark.parametrize("draft", SAMPLED_CHAINS)
@pytest.mark.parametrize("rule", ["token", "block", "traversal"])
def test_sampled_chains(rule: str, draft: str) -> None:
    make, vocab, length = SAMPLED_CHAINS[draft]
    for seed in (0, 1):
        world = World(vocab, seed)
        check_law(RULES[rule], make(world), world, length)


@pytest.mark.parametrize("draft", SAMPLED_TREES)
@pytest.mark.parametrize("rule", ["token", "traversal"])
def test_sampled_and_mixed_trees(rule: str, draft: str) -> None:
    make, vocab, length = SAMPLED_TREES[draft]
    world = World(vocab, seed=4)
    check_law(RULES[rule], make(world), world, length)


@pytest.mark.parametrize("draft", CHOSEN)
@pytest.mark.parametrize("rule", ["siblings", "token", "block", "traversal"])
def test_chosen_drafts(rule: str, draft: str) -> None:
    budget, vocab, length = CHOSEN[draft]
    world = World(vocab, seed=3)
    make = grown(world, budget, draw=False)
    if rule == "block" and not draft.startswith("chain"):
        with pytest.raises(ValueError, match="'block' is for chains"):
            check_law(RULES[rule], make, world, length)
    else:
        check_law(RULES[rule], make, world, length)


def test_longer_memories() -> None:
    """Laws that look at two tokens, over three rounds and more."""
    world = World(3, seed=5, order=2)
    check_law(RULES["block"], grown(world, Budget.chain(2)), world, 5)
    check_law(RULES["traversal"], chosen_first(world), world, 5)


# three named mutants of every rule


def redraws(draft: Draft, at: At, chooser: Chooser) -> Verdict:
    """Mutant of ``siblings``: after a miss the token that missed is not emitted, another one is drawn."""
    path, _ = verify.siblings(draft, at, chooser)
    return Verdict(path, chooser.sample(at.p(path[-1] if path else -1)))


def flattened(draft: Draft, node: int, q: Tensor) -> Tensor:
    """q before the temperature at which the token was drawn."""
    return q.sqrt() / q.sqrt().sum()


def with_replacement(draft: Draft, node: int, q: Tensor) -> Tensor:
    """The eldest sibling's q, though elder siblings' tokens could not be drawn again."""
    eldest = draft.q[draft.children(draft.parents[node])[0]]
    assert eldest is not None
    return eldest


def chosen_but_told(world: World) -> Make:
    """An arg-max draft with its softmax as q."""
    chosen = grown(world, Budget.chain(2), draw=False)

    def make(chooser: Chooser, text: tuple[int, ...]) -> Draft:
        draft = chosen(chooser, text)
        paths = [[draft.tokens[i] for i in draft.path(parent)] for parent in draft.parents]
        qs = tuple(world.draft_logits((*text, *path)).softmax(-1).float() for path in paths)
        return Draft(draft.tokens, draft.parents, qs)

    return make


def unweighted(p: Tensor, q: Tensor, weight: float = 1.0) -> tuple[Tensor, float]:
    """The residual of the token rule."""
    return residual(p, q)


CHAIN, FORK = Budget.chain(2), static("fork")
Patch = tuple[object, str, object] | None
# (rule, mutant) → what is patched, the rule, the drafts
MUTANTS: dict[tuple[str, str], tuple[Patch, Rule, Callable[[World], Make]]] = {
    ("token", "residual is p"): ((verify, "residual", lambda p, q: (p, 1.0)), verify.token, drawn(CHAIN)),
    ("token", "wrong q"): (None, verify.token, lambda world: told(grown(world, CHAIN), flattened)),
    ("token", "siblings with replacement"): (
        None,
        verify.token,
        lambda world: told(grown(world, FORK), with_replacement),
    ),
    ("siblings", "redraws"): (None, redraws, lambda world: grown(world, CHAIN, draw=False)),
    ("siblings", "wrong q"): (None, verify.token, chosen_but_told),
    ("block", "residual of the token rule"): ((infer.block, "residual", unweighted), verify.block, drawn(CHAIN)),
    ("block", "wrong q"): (None, verify.block, lambda world: told(grown(world, CHAIN), flattened)),
    ("block", "keeps by weight alone"): (
        (infer.block, "share_kept", lambda mass, weight: weight),
        verify.block,
        drawn(CHAIN),
    ),
    ("traversal", "residual of the token rule"): (
        (infer.traversal, "residual", unweighted),
        verify.traversal,
        drawn(FORK),
    ),
    ("traversal", "siblings with replacement"): (
        None,
        verify.traversal,
        lambda world: told(grown(world, FORK), with_replacement),
    ),
    ("traversal", "keeps by weight alone"): (
        (infer.traversal, "share_kept", lambda mass, weight: weight),
        verify.traversal,
        drawn(FORK),
    ),
}


@pytest.mark.parametrize(("rule", "mutant"), MUTANTS)
def test_mutants_leave_the_law(rule: str, mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, mutated, make = MUTANTS[rule, mutant]
    world = World(3, seed=2)
    if patch is not None:
        monkeypatch.setattr(*patch)
    with pytest.raises(AssertionError, match=r"largest difference of a probability: 0\.(0[1-9]|[1-9])"):
        check_law(mutated, make(world), world, 4)


@pytest.mark.parametrize("rule", ["token", "siblings", "block", "traversal"])
def test_mutant_reused_random_numbers_leaves_the_law(rule: str) -> None:
    """One number for the draft, all acceptances and the last token; with fresh ones the law is the target's."""
    world = World(3, seed=2)
    context = world.contexts()[0]
    make = grown(world, FORK if rule == "traversal" else CHAIN, draw=rule != "siblings")
    lawful = target_law(world.target, context, 3, 3)
    fresh = round_of(RULES[rule], drafts_of(make, context), world.target, context)
    again = reusing(RULES[rule], make, world.target, context)
    assert distance(completed(fresh, world.target, context, 3, 3), lawful) < 1e-12
    assert distance(completed(again, world.target, context, 3, 3), lawful) > 0.03  # the grid alone makes some 0.002


# greedy has no chances to count: its text is the arg-max text


def second_best(draft: Draft, at: At, chooser: Chooser) -> Verdict:
    path, _ = verify.greedy(draft, at, chooser)
    return Verdict(path, int(at.p(path[-1] if path else -1).topk(2).indices[1]))


def believes_the_draft(draft: Draft, at: At, chooser: Chooser) -> Verdict:
    path = draft.path(0)
    return Verdict(path, at.best(path[-1]))


def looks_at_the_root_again(draft: Draft, at: At, chooser: Chooser) -> Verdict:
    path, _ = verify.greedy(draft, at, chooser)
    return Verdict(path, at.best(-1))


def check_greedy(rule: Rule) -> None:
    rejected = rounds = 0
    for seed in range(40):
        world = World(3, seed, opposed=-0.5)
        for budget in (Budget.chain(3), static("full"), Budget(rows=6, depth=3, width=2)):
            context = world.contexts()[seed % 3]
            (draft,) = (draft for _, draft in drafts_of(grown(world, budget, draw=False), context))
            out = round_of(rule, [(1.0, draft)], world.target, context)
            (emitted,) = out.law
            text: tuple[int, ...] = ()
            for _ in emitted:
                text = (*text, int(world.target((*context, *text)).argmax()))
            assert emitted == text
            paths = [tuple(draft.tokens[i] for i in draft.path(node)) for node in range(len(draft))]
            assert len(emitted) == 1 + max((len(path) for path in paths if path == text[: len(path)]), default=0)
            rounds += 1
            rejected += out.rejected > 0
    assert rejected / rounds >= 0.3


def test_greedy_is_the_arg_max_text() -> None:
    check_greedy(verify.greedy)


@pytest.mark.parametrize("mutant", [second_best, believes_the_draft, looks_at_the_root_again])
def test_greedy_mutants_leave_it(mutant: Rule) -> None:
    with pytest.raises(AssertionError):
        check_greedy(mutant)
