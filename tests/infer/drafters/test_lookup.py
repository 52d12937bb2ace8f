"""Prompt lookup: what it drafts, within which bounds, and that it changes no text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heads.draft import Draft
from heads.grow import Budget
from heads.target import Target
from infer.decode import Decoding
from infer.drafters import Drafter, LookupDrafter
from infer.stopping import Stop
from tests.infer.drafters.test_automaton import TARGET, ends, rescan
from tests.infer.exact import Make, World, check_law
from tests.infer.fakes import Chooser
from tests.tiny import tiny_model

SETTINGS = settings(max_examples=100, deadline=None, derandomize=True)
SHAPES: list[list[tuple[int, ...]]] = [
    [(0,)],
    [(0,), (1,), (0, 0)],
    [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)],
    [(1,), (1, 1)],
]
BUDGETS = st.one_of(
    st.integers(0, 9).map(Budget.chain),
    st.builds(Budget, st.integers(1, 12), st.integers(0, 6), st.integers(1, 4)),
    st.sampled_from(SHAPES).map(Budget.static),
)
TEXTS = st.integers(1, 4).flatmap(lambda most: st.lists(st.integers(0, most), min_size=1, max_size=28))


def behind(text: list[int], shortest: int = 2) -> LookupDrafter:
    drafter = LookupDrafter(shortest)
    drafter.begin(TARGET, torch.tensor([text]), None)
    return drafter


def chain(text: list[int], depth: int = 4, shortest: int = 2) -> list[int]:
    return list(behind(text, shortest).propose(Budget.chain(depth), None).tokens)


def test_it_continues_as_the_text_did() -> None:
    assert chain([1, 2, 3, 4, 5, 6, 7, 8, 1, 2]) == [3, 4, 5, 6]
    assert chain([1, 2, 3, 9, 2, 4, 8, 1, 2]) == [3, 9, 2, 4]  # the longer match, not the later one
    assert chain([1, 2, 3, 1, 2, 4, 1, 2]) == [
        4,
        1,
        2,
        4,
    ]  # the later one of two that are as long; then the draft's own
    assert chain([1, 2, 3, 1, 2, 3, 1, 2, 4, 7, 8, 1, 2])[0] == 3  # the more frequent one


def test_no_match_no_draft() -> None:
    assert chain([1, 2, 3, 4]) == []
    assert chain([1, 2, 3, 1]) == [] and chain([1, 2, 3, 1], shortest=1) == [2, 3, 1, 2]
    assert chain([1, 2, 3, 1, 2], shortest=3) == []
    assert chain([4]) == []
    with pytest.raises(ValueError, match="matches of 1 token or more, not 0"):
        LookupDrafter(0)


@pytest.mark.parametrize("period", [1, 2, 5])
def test_a_loop_is_drafted_to_full_depth(period: int) -> None:
    text = [at % period for at in range(2 * period + 2)]
    assert chain(text, depth=30) == [at % period for at in range(len(text), len(text) + 30)]


@SETTINGS
@given(TEXTS, BUDGETS, st.integers(1, 3))
def test_every_draft_keeps_its_budget_and_quotes_the_text(text: list[int], budget: Budget, shortest: int) -> None:
    draft = behind(text, shortest).propose(budget, None)
    assert len(draft) <= budget.rows - 1 and max(draft.depths, default=0) <= budget.depth
    assert all(q is None for q in draft.q) and len(draft.scores) == len(draft)
    if rescan(text) < shortest or budget.rows < 2 or budget.depth < 1:
        assert len(draft) == 0
        return
    for node in range(-1, len(draft)):
        children = draft.children(node)
        if budget.shape is None:
            assert len(children) <= budget.width
        tokens = [draft.tokens[child] for child in children]
        assert len(set(tokens)) == len(tokens)
        scores = [draft.scores[child] for child in children]
        assert scores == sorted(scores, reverse=True) and all(score < 0 for score in scores)
        path = text + [draft.tokens[i] for i in draft.path(node)]
        for token in tokens:  # it followed an occurrence of the last tokens before it
            assert ends(text, [*path[-shortest:], token], len(text))
    if budget.shape is None and (budget.width == 1 or budget.depth > 1):  # there is always more of the same
        assert len(draft) == min(budget.rows - 1, budget.depth) if budget.width == 1 else len(draft) > 0
    if budget.shape is not None and budget.shape[0] == (0,):
        assert draft.tokens[0] == chain(text, 1, shortest)[0]


@SETTINGS
@given(TEXTS)
def test_a_tree_offers_every_continuation_of_the_longest_match_first(text: list[int]) -> None:
    n = rescan(text)
    if n < 1:
        return
    followed = {text[end + 1] for end in ends(text, text[-n:], len(text) - 1)}
    draft = behind(text, 1).propose(Budget(rows=20, depth=1, width=19), None)
    assert followed <= set(draft.tokens)
    assert draft.tokens[0] in followed


def test_shorter_matches_say_what_else_may_come() -> None:
    draft = behind([1, 2, 3, 9, 2, 4, 8, 1, 2], 1).propose(Budget.static([(0,), (1,), (2,), (1, 0)]), None)
    assert (draft.tokens, draft.parents) == ((3, 4, 8), (-1, -1, 1))  # there is no third continuation


def test_it_reads_on_and_forks_know_nothing() -> None:
    drafter = behind([1, 2, 3])
    other = drafter.fork()
    drafter.commit(None, [1, 2])
    assert drafter.propose(Budget.chain(2), None).tokens == (3, 1)
    assert len(other.propose(Budget.chain(2), None)) == 0
    other.begin(TARGET, torch.tensor([[4, 5, 6, 4, 5]]), None)
    assert other.propose(Budget.chain(1), None).tokens == (6,)
    assert drafter.propose(Budget.chain(1), None).tokens == (3,)
    drafter.begin(TARGET, torch.tensor([[7, 1, 2]]), None)
    assert len(drafter.propose(Budget.chain(1), None)) == 0
    assert isinstance(drafter, Drafter)


REPEATING = torch.tensor([[7, 3, 44, 12, 9, 7, 3, 44, 12, 30, 7, 3]])


def decode(model: Any, drafter: Drafter, budget: Budget, new: int = 40) -> tuple[list[int], Decoding]:
    """Greedy text and what it took."""
    decoding = Decoding(Target(model), REPEATING, drafter, budget, Stop(REPEATING.shape[1] + new))
    return [token for emitted in decoding.run() for token in emitted], decoding


@pytest.mark.parametrize("budget", [Budget.chain(10), Budget(12, 5, 3), Budget.static(SHAPES[2])])
def test_the_text_is_the_target_s(budget: Budget) -> None:
    model = tiny_model("llama", vocab=12)  # a small vocabulary repeats itself
    ids = REPEATING % 12
    theirs = model.generate(ids, do_sample=False, max_new_tokens=40)[0, ids.shape[1] :].tolist()
    decoding = Decoding(Target(model), ids, LookupDrafter(1), budget, Stop(ids.shape[1] + 40))
    assert [token for emitted in decoding.run() for token in emitted] == theirs
    assert decoding.stats.proposed > decoding.stats.accepted > 0


def looked_up(budget: Budget) -> Any:
    def of(world: World) -> Make:
        def make(chooser: Chooser, text: tuple[int, ...]) -> Draft:
            # the context's first token, then twice what may follow: enough to look up
            drafter = behind([*range(world.vocab), *reversed(range(world.vocab)), *text], 1)
            return drafter.propose(budget, None)

        return make

    return of


@pytest.mark.parametrize("budget", [Budget.chain(2), Budget(6, 2, 2)])
def test_sampled_text_keeps_the_law(budget: Budget) -> None:
    from infer.verify import siblings, token

    world = World(3, 1)
    for rule in (siblings, token):
        check_law(rule, looked_up(budget)(world), world, 3, rejected=0.1)
