"""Which rule decides which draft, what is refused, and what a rule that looks ahead leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from heads.draft import Draft
from infer import verify
from infer.foresight import copyable
from infer.processors import NodeScores
from infer.tokens import Tokens
from infer.verify import RULES, RandomChooser, choose_rule, named

Q = torch.full((8,), 1 / 8)
CHOSEN = Draft.chain([1, 2])
DRAWN = Draft.chain([1, 2], [Q, Q])
HALF = Draft.chain([1, 2], [Q, None])
TREE = Draft((1, 2, 3), (-1, -1, 0), (Q, Q, Q))
MIXED = Draft((1, 2, 3), (-1, -1, 0), (Q, None, None))
TOPS = Draft((1, 2, 3), (-1, -1, 0), (None, None, None))


def test_the_best_rule_for_the_draft() -> None:
    assert all(choose_rule(draft, False) is verify.greedy for draft in (CHOSEN, DRAWN, TREE, Draft.empty()))
    assert [choose_rule(draft, True) for draft in (CHOSEN, TOPS, Draft.empty())] == [verify.siblings] * 3
    assert [choose_rule(draft, True) for draft in (DRAWN, HALF)] == [verify.block] * 2
    assert [choose_rule(draft, True) for draft in (TREE, MIXED)] == [verify.traversal] * 2


def test_rules_say_which_of_them_look_ahead() -> None:
    assert {name for name, rule in RULES.items() if getattr(rule, "lookahead", False)} == {"block", "traversal"}


def test_names() -> None:
    assert named("auto", True) is None and named("auto", False) is None
    assert named("block", True) is verify.block and named("greedy", False) is verify.greedy
    with pytest.raises(ValueError, match=r"no rule 'bloc', only auto, greedy, siblings.*did you mean 'block'"):
        named("bloc", True)
    for name, do_sample in [("greedy", True), ("token", False)]:
        with pytest.raises(ValueError, match=f"'{name}' does not go with do_sample={do_sample}"):
            named(name, do_sample)


class Flat:
    foresight = True

    def p(self, node: int) -> Tensor:
        return Q.double()

    peek = p

    def best(self, node: int) -> int:
        return 0

    def settle(self, path: Sequence[int]) -> None:
        pass


@pytest.mark.parametrize(
    ("rule", "draft", "message"),
    [
        ("block", TREE, "'block' is for chains and this draft is a sampled tree of 3 tokens: use 'traversal'"),
        ("block", TOPS, "'block' is for chains and this draft is a chosen tree of 3 tokens"),
        ("siblings", DRAWN, "'siblings' is for chosen drafts and this draft is a sampled chain of 2 tokens"),
        ("siblings", MIXED, r"'siblings' is for chosen drafts and this draft is a mixed \(1 sampled\) tree"),
    ],
)
def test_a_rule_refuses_drafts_it_is_not_for(rule: str, draft: Draft, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RULES[rule](draft, Flat(), RandomChooser())


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_takes_the_empty_draft(rule: str) -> None:
    path, token = RULES[rule](Draft.empty(), Flat(), RandomChooser())
    assert path == [] and 0 <= token < 8


def test_a_token_its_q_excludes_is_refused() -> None:
    draft = Draft.chain([0], [torch.tensor([0.0, 1.0])])
    with pytest.raises(ValueError, match="the very tensor that was sampled from"):
        verify.token(draft, Flat(), RandomChooser())


def test_only_a_matching_prefix_counts() -> None:
    """Matches 1, 0, 1, 0 along a chain of four are one accepted token."""

    class Says:
        def best(self, node: int) -> int:
            return [5, 6, 7, 8, 9][node + 1]

        def p(self, node: int) -> Tensor:
            raise AssertionError("greedy asks for no distribution")

        peek = p
        foresight = True

        def settle(self, path: Sequence[int]) -> None:
            raise AssertionError("greedy does not look ahead")

    verdict = verify.greedy(Draft.chain([5, 0, 7, 0]), Says(), RandomChooser())
    assert verdict == ([0], 6)


# looking ahead


class Counting(LogitsProcessor):
    """Forbids another token at each call, and remembers what it was shown."""

    def __init__(self) -> None:
        self.shown: list[list[int]] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores[:, len(self.shown) % 8] = float("-inf")
        self.shown.append(input_ids[0].tolist())
        return scores


class Closed(LogitsProcessor):
    """Keeps its state in a function."""

    def __init__(self) -> None:
        calls = []

        def count() -> int:
            calls.append(1)
            return len(calls)

        self.count = count

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores[:, self.count() % 8] = float("-inf")
        return scores


SEEN: list[int] = []


class Global(LogitsProcessor):
    """Keeps its state beside it."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        SEEN.append(1)
        return scores


class Holding(LogitsProcessor):
    """Holds a model."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores


def enclosing() -> LogitsProcessor:
    """A processor whose state is a variable of the function it was made in."""
    calls: list[int] = []

    class Enclosed(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            calls.append(1)
            return scores

    return Enclosed()


def test_only_plain_data_is_copied() -> None:
    assert copyable(Counting()) and copyable(RepetitionPenaltyLogitsProcessor(1.2))
    for processor in (Closed(), Global(), Holding(), enclosing(), lambda ids, scores: scores):
        assert not copyable(processor)


def scores_of(draft: Draft, *processors: Any) -> NodeScores:
    tokens = Tokens(torch.tensor([[5, 6, 7]]))
    logits = torch.randn(1 + len(draft), 8, generator=torch.Generator().manual_seed(0))
    return NodeScores(LogitsProcessorList(processors), logits, draft, tokens)


@pytest.mark.parametrize("rule", ["block", "traversal"])
@pytest.mark.parametrize("seed", range(6))
def test_rejected_nodes_leave_no_trace(rule: str, seed: int) -> None:
    """A processor with a state sees the committed text and each accepted token, once and in order."""
    counting, draft = Counting(), DRAWN if rule == "block" else TREE
    at = scores_of(draft, counting)
    path, token = RULES[rule](draft, at, RandomChooser(torch.Generator().manual_seed(seed)))
    text = [5, 6, 7, *(draft.tokens[node] for node in path)]
    assert counting.shown == [text[: 3 + i] for i in range(len(path) + 1)]
    assert token != len(path), "the last token is drawn from the scores at the end of the path, processed there"


def test_what_is_peeked_is_what_is_said() -> None:
    """Copies have seen exactly the ancestors: the distribution is that of a text which went this way."""
    at = scores_of(TREE, Counting(), RepetitionPenaltyLogitsProcessor(1.3))
    peeked = {node: at.peek(node) for node in (-1, 0, 1, 2)}
    for path in ([-1, 0, 2], [-1, 1]):
        walked = scores_of(TREE, Counting(), RepetitionPenaltyLogitsProcessor(1.3))
        for node in path:
            assert torch.equal(walked.p(node), peeked[node])


@pytest.mark.parametrize("processor", [Closed(), enclosing(), Holding()], ids=["function", "closure", "model"])
def test_what_cannot_be_copied_does_not_look_ahead(processor: Any) -> None:
    at = scores_of(DRAWN, processor)
    assert not at.foresight
    assert choose_rule(DRAWN, True, at) is verify.token and choose_rule(TREE, True, at) is verify.token
    assert choose_rule(CHOSEN, True, at) is verify.siblings and choose_rule(DRAWN, False, at) is verify.greedy
    with pytest.raises(ValueError, match=f"{type(processor).__name__} cannot be copied.*'token'"):
        RULES["block"](DRAWN, at, RandomChooser())


def test_stateless_processors_are_not_copied() -> None:
    at = scores_of(TREE, RepetitionPenaltyLogitsProcessor(1.3))
    assert at.foresight and choose_rule(TREE, True, at) is verify.traversal
    assert torch.equal(at.peek(2), at.p(2))
