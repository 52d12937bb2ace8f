"""Merged trees: exact for every mixture of drawn and chosen drafts, within the budget, every token once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heads.draft import Draft
from heads.grow import NOTHING, Budget, Sampler
from infer.drafters import FirstToSpeak, Merged, NoDrafter
from infer.drafters import merge as module
from infer.drafters.merge import merge, part_of
from infer.verify import Chooser, Rule, token, traversal
from tests.infer.exact import Make, Text, World, check_law, grown
from tests.infer.fakes import FakeDrafter

SETTINGS = settings(max_examples=100, deadline=None, derandomize=True)
Part = Callable[[World], Make]
PAIR = Budget.static([(0,), (1,)])


def drawn(budget: Budget, *ids: int) -> Part:
    """As heads draw; over a draft vocabulary if one is named."""
    return lambda world: grown(world, budget, ids=torch.tensor(ids) if ids else None)


def chosen(budget: Budget) -> Part:
    return lambda world: grown(world, budget, draw=False)


def merged(*parts: Part) -> Part:
    def of(world: World) -> Make:
        makes = [part(world) for part in parts]
        return lambda chooser, text: merge([make(chooser, text) for make in makes], world.vocab)

    return of


# parts, vocabulary, tokens looked at
MIXTURES: dict[str, tuple[tuple[Part, ...], int, int]] = {
    "drawn | drawn": ((drawn(Budget.chain(2)), drawn(Budget.chain(1))), 3, 4),
    "drawn | chosen": ((drawn(Budget.chain(2)), chosen(Budget.chain(2))), 3, 4),
    "chosen | drawn": ((chosen(Budget.chain(2)), drawn(Budget.chain(2))), 3, 4),
    "chosen tree | drawn": ((chosen(PAIR), drawn(Budget.chain(2))), 4, 3),
    "drawn tree | drawn": ((drawn(PAIR), drawn(Budget.chain(1))), 4, 3),
    "drawn | drawn tree": ((drawn(Budget.chain(1)), drawn(PAIR)), 4, 3),
    "three": ((drawn(Budget.chain(1)), chosen(Budget.chain(2)), drawn(Budget.chain(1))), 4, 3),
    "same narrow vocabulary": ((drawn(Budget.chain(1), 0, 2), drawn(Budget.chain(1), 0, 2)), 4, 3),
    "narrow | whole": ((drawn(Budget.chain(1), 1, 3), drawn(Budget.chain(1))), 4, 3),
    "narrow | another narrow": ((drawn(Budget.chain(1), 1, 3), drawn(Budget.chain(1), 0, 1, 2)), 4, 3),
    "chosen | narrow": ((chosen(Budget.chain(1)), drawn(Budget.chain(1), 0, 2)), 4, 3),
}


@pytest.mark.parametrize("rule", [token, traversal])
@pytest.mark.parametrize("name", MIXTURES)
def test_merged_trees_keep_the_law(name: str, rule: Rule) -> None:
    parts, vocab, length = MIXTURES[name]
    for seed in range(2):
        world = World(vocab, seed)
        check_law(rule, merged(*parts)(world), world, length, rejected=0.2)


def test_enough_is_rejected_to_prove_something() -> None:
    world = World(4, 0)
    check_law(token, merged(drawn(Budget.chain(1), 1, 3), drawn(Budget.chain(1)))(world), world, 3, rejected=0.3)


def two() -> tuple[World, Make]:
    world = World(3, 0)
    return world, merged(*MIXTURES["drawn | drawn"][0])(world)


def test_mutant_q_that_does_not_know_its_elder_siblings_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    world, make = two()
    monkeypatch.setattr(module, "_without", lambda q, tokens, ids: q)
    with pytest.raises(AssertionError, match="largest difference"):
        check_law(token, make, world, 3)


def test_mutant_rows_saved_on_unlikely_draws_fails() -> None:
    world, make = two()

    def kept(chooser: Chooser, text: Text) -> Draft:
        draft = make(chooser, text)
        q = draft.q[-1]
        unlikely = q is not None and float(q[draft.tokens[-1]] / q.sum()) < 0.5
        return draft.shorten(nodes=len(draft) - 1) if unlikely else draft

    with pytest.raises(AssertionError, match="largest difference"):
        check_law(token, kept, world, 3)


def test_mutant_elders_that_know_their_younger_siblings_fails() -> None:
    world, make = two()

    def told(chooser: Chooser, text: Text) -> Draft:
        draft = make(chooser, text)
        elder, *younger = draft.children(-1)
        q = draft.q[elder]
        assert q is not None
        known = module._without(q, [draft.tokens[child] for child in younger], None)
        return Draft(draft.tokens, draft.parents, (known, *draft.q[1:]))

    with pytest.raises(AssertionError, match="largest difference"):
        check_law(token, told, world, 3)


# trees


@st.composite
def trees(draw: st.DrawFn, name: str = "a", largest: int = 6) -> Draft:
    """A chosen tree whose siblings differ, over 3 tokens."""
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(draw(st.integers(0, largest))):
        parent, said = draw(st.integers(-1, len(tokens) - 1)), draw(st.integers(0, 2))
        if (parent, said) not in zip(parents, tokens, strict=True):
            tokens.append(said)
            parents.append(parent)
    return Draft(tuple(tokens), tuple(parents), (None,) * len(tokens), sources=(name,) * len(tokens))


def paths(draft: Draft) -> list[Text]:
    return [tuple(draft.tokens[i] for i in draft.path(node)) for node in range(len(draft))]


@SETTINGS
@given(trees("a"), trees("b"), trees("c"))
def test_every_path_is_there_once(a: Draft, b: Draft, c: Draft) -> None:
    tree = merge([a, b, c], 3)
    found = paths(tree)
    assert sorted(found) == sorted({*paths(a), *paths(b), *paths(c)})
    for path, source in zip(found, tree.sources, strict=True):
        assert source == ("a" if path in paths(a) else "b" if path in paths(b) else "c")
    for node in range(-1, len(tree)):
        sources = [tree.sources[child] for child in tree.children(node)]
        assert sources == sorted(sources)  # the first drafter's children are tried first


def test_equal_tokens_go_on_below_the_first() -> None:
    q = [torch.tensor([0.2, 0.3, 0.5]) for _ in range(4)]
    a, b = Draft.chain([1, 2], q[:2], scores=[-1.0, -2.0]), Draft.chain([1, 0, 2], q[1:], scores=[-3.0, -4.0, -5.0])
    tree = merge([a, b], 3)
    assert (tree.tokens, tree.parents, tree.scores) == ((1, 2, 0, 2), (-1, 0, 0, 2), (-1.0, -2.0, -4.0, -5.0))
    assert tree.q[:2] == tuple(q[:2]) and tree.q[3] is q[3]
    assert tree.q[2] is not None and tree.q[2].tolist() == pytest.approx([0.2, 0.3, 0.0])  # not 2, which is there
    assert q[2].tolist() == pytest.approx([0.2, 0.3, 0.5])
    assert merge([a, Draft.chain([5])], 6).scores == ()
    assert merge([], 3) == Draft.empty() and merge([Draft.empty(), a], 3) is a


# rows


class Filling(FakeDrafter):
    """As many tokens as it may, up to ``most``, counted up from ``first``; remembers what it was asked for."""

    def __init__(self, first: int, lookahead: int = 4, most: int = 99) -> None:
        super().__init__(())
        self.first, self.lookahead, self.most = first, lookahead, most
        self.asked: list[Budget] = []

    def draft(self, budget: Budget, sampler: Sampler | None) -> Draft:
        self.asked.append(budget)
        chain = budget.width == 1
        count = min(self.most, budget.depth if chain else budget.rows - 1)
        tokens = list(range(self.first, self.first + count))
        return Draft.chain(tokens) if chain else Draft(tuple(tokens), (-1,) * count, (None,) * count)


class Free(Filling):
    free = True


def rows(budget: Budget, *parts: FakeDrafter, weights: tuple[float, ...] | None = None) -> list[int]:
    """How many nodes each part has in the tree; tokens name the part by their hundreds."""
    drafter = Merged(parts, [str(at) for at in range(len(parts))], weights=weights)
    drafter._vocab_size = 1000
    tree = drafter.propose(budget, None)
    assert len(tree) <= budget.rows - 1 and max(tree.depths, default=0) <= budget.depth
    assert list(tree.tokens) == sorted(tree.tokens) and [str(token // 100) for token in tree.tokens] == list(
        tree.sources
    )
    return [tree.sources.count(str(at)) for at in range(len(parts))]


def test_rows_are_shared_by_look_ahead_or_weight() -> None:
    assert rows(Budget.chain(12), Filling(0, 8), Filling(100, 4)) == [8, 4]
    assert rows(Budget.chain(6), Filling(0, 8), Filling(100, 4)) == [4, 2]
    assert rows(Budget.chain(1), Filling(0, 8), Filling(100, 4)) == [1, 0]
    assert rows(Budget(rows=13, depth=3, width=4), Filling(0, 4), Filling(100, 4)) == [6, 6]
    assert rows(Budget(rows=13, depth=3, width=4), Filling(0, 4), Filling(100, 4), weights=(3, 1)) == [9, 3]
    assert rows(Budget.static([(0,), (1,), (2,), (3,)]), Filling(0), Filling(100)) == [2, 2]


def test_a_split_budget_gives_each_its_own() -> None:
    split = Budget.split([Budget.chain(2), Budget(rows=6, depth=2, width=3)])
    assert rows(split, Filling(0, 8), Filling(100, 4)) == [2, 5]
    assert rows(Budget.split([NOTHING, Budget.chain(3)]), Filling(0, 8), Filling(100, 4)) == [0, 3]
    first = FirstToSpeak([Filling(0, 8), Filling(100, 4)], ["0", "1"])
    assert first.propose(Budget.split([NOTHING, Budget.chain(3)]), None).sources == ("1",) * 3
    with pytest.raises(ValueError, match="split in 3 does not fit 2"):
        first.propose(Budget.split([NOTHING, NOTHING, Budget.chain(1)]), None)


def test_what_one_leaves_goes_to_those_behind_it() -> None:
    tree = Budget(rows=13, depth=3, width=4)
    assert rows(tree, Filling(0, most=1), Filling(100)) == [1, 11]
    assert rows(tree, Filling(0), Free(100, most=0)) == [12, 0]  # the free one is asked first and tried last
    assert rows(tree, Filling(0), Free(100, most=2), Filling(200)) == [5, 2, 5]
    assert rows(Budget.chain(5), NoDrafter(), Filling(100, 5)) == [0, 5]  # type: ignore[arg-type]


def test_no_part_is_asked_for_more_than_its_look_ahead() -> None:
    short, long = Filling(0, 2), Filling(100, 6)
    assert Merged([short, long]).lookahead == 8
    assert rows(Budget(rows=30, depth=6, width=1), short, long) == [2, 6]
    assert short.asked[-1].depth == 2


@pytest.mark.parametrize("nodes", range(4))
@pytest.mark.parametrize("budget", [Budget.chain(3), Budget(4, 2, 2), Budget.static([(0,), (1,), (0, 0)])])
def test_a_part_of_a_budget(budget: Budget, nodes: int) -> None:
    part = part_of(budget, nodes)
    assert part.rows == nodes + 1 and part.depth <= budget.depth
    assert (part.shape is None) == (budget.shape is None)


def test_wrong_weights_are_refused() -> None:
    for weights in ((1.0,), (1.0, 0.0)):
        with pytest.raises(ValueError, match="a positive weight for each"):
            Merged([Filling(0), Filling(100)], weights=weights)


def test_forks_keep_the_weights_and_nothing_else() -> None:
    drafter = Merged([Filling(0), Filling(100)], ["a", "b"], weights=(1, 3))
    other = drafter.fork()
    assert (other.names, other.weights) == (("a", "b"), (1, 3))
    assert all(mine is not theirs for mine, theirs in zip(drafter.parts, other.parts, strict=True))
