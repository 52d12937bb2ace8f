"""Drafters gone wrong: the output is still exactly the target's, or there is one clear error; nothing stays broken."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import infer
from heads.draft import Draft
from heads.grow import Budget, Sampler
from heads.target import Target
from infer.decode import Decoding
from infer.drafters import Drafter, FirstToSpeak, HeadsDrafter, LookupDrafter, Merged
from infer.drafters.draft_model import DraftModelDrafter
from infer.stopping import Stop
from infer.verify import Rule, block, token, traversal
from tests.heads.small import small_heads
from tests.infer.exact import Context, World, check_law, grown
from tests.infer.fakes import FakeDrafter
from tests.tiny import tiny_model

PROMPT = torch.tensor([[7, 3, 44, 12, 9, 30, 21, 5, 60]])
NEW = 12
CHAIN, TREE = Budget.chain(3), Budget(rows=8, depth=3, width=2)
STATIC = Budget.static([(0,), (1,), (0, 0), (1, 0)])
BAD = [float("nan"), float("inf"), float("-inf")]
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_p": 0.95}


@cache
def target() -> Target:
    return Target(tiny_model("llama"))


@cache
def plain() -> list[int]:
    return target().model.generate(PROMPT, do_sample=False, max_new_tokens=NEW)[0].tolist()


def generate(drafter: Any, budget: Budget | None, **settings: Any) -> infer.Generation:
    return infer.generate(target(), PROMPT, drafter, budget=budget, max_new_tokens=NEW, **settings)


# numbers that are none


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_heads_with_ruined_weights(kind: str, value: float) -> None:
    ruined = small_heads(kind, target())
    with torch.no_grad():
        for parameter in ruined.parameters():
            if parameter.requires_grad and parameter.dim() == 2:
                parameter[::2] = value
    for budget in (CHAIN, TREE, STATIC):
        assert generate(ruined, budget).sequences[0].tolist() == plain()
        out = generate(ruined, budget, seed=1, **SAMPLED)
        assert out.sequences.shape[1] == PROMPT.shape[1] + NEW and out.stats.proposed > 0


def test_a_draft_model_with_ruined_weights() -> None:
    model = tiny_model("llama", layers=1)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.fill_(float("nan"))
    for budget in (CHAIN, TREE, STATIC):
        assert generate(DraftModelDrafter(model), budget).sequences[0].tolist() == plain()
        assert generate(DraftModelDrafter(model), budget, seed=1, **SAMPLED).stats.tokens == NEW


def broken(*rows: list[float]) -> World:
    """A world whose drafter answers these logits, one row for each last token."""
    world = World(3, 0)
    logits = torch.tensor(rows, dtype=torch.float64)
    world._draft = Context(lambda text: logits[text[-1] % len(rows)], 1)
    return world


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("budget", [Budget.chain(2), STATIC, Budget(rows=5, depth=2, width=2)])
@pytest.mark.parametrize("rows", [[[NAN] * 3], [[INF, 0.0, NAN], [-INF] * 3, [0.0, INF, INF]], [[0.0, -INF, 1e308]]])
@pytest.mark.parametrize("draw", [True, False])
def test_logits_that_are_no_numbers_keep_the_law(rows: list[list[float]], budget: Budget, draw: bool) -> None:
    world = broken(*rows)
    rules: list[Rule] = [token, traversal] + ([block] if budget.width == 1 and budget.shape is None else [])
    for rule in rules:
        check_law(rule, grown(world, budget, draw=draw), world, 3, rejected=0.1)


class Told(FakeDrafter):
    """A token that it says it drew from ``q``."""

    def __init__(self, q: Tensor, said: int = 0) -> None:
        super().__init__(())
        self.q, self.said = q, said

    def draft(self, budget: Budget, sampler: Sampler | None) -> Draft:
        return Draft.chain([self.said], [self.q])


@pytest.mark.parametrize(
    ("q", "message"),
    [
        (torch.full((64,), NAN), "the very tensor that was sampled from"),
        (torch.cat([torch.ones(63), torch.tensor([INF])]), "the very tensor that was sampled from"),
        (torch.cat([torch.zeros(1), torch.ones(63)]), "the very tensor that was sampled from"),
        (torch.zeros(64), "the very tensor that was sampled from"),
        (torch.ones(65), "65 entries for 64 tokens"),
    ],
)
@pytest.mark.parametrize("rule", ["auto", "token", "traversal"])
def test_a_q_that_cannot_be_is_one_clear_error(q: Tensor, message: str, rule: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(Told(q), CHAIN, rule=rule, seed=0, **SAMPLED)
    assert generate(Told(q), CHAIN).sequences[0].tolist() == plain()  # greedy decoding does not look at q


# ids that are none


class Says(FakeDrafter):
    """Right tokens for some rounds, then what ``then`` makes of the text."""

    def __init__(self, then: Callable[[list[int]], Any], rounds: int = 2, taps: tuple[int, ...] = ()) -> None:
        super().__init__(taps)
        self.then, self.good = then, rounds

    def draft(self, budget: Budget, sampler: Sampler | None) -> Draft:
        if self.rounds <= self.good:
            return Draft.chain(plain()[len(self.text) :][:1])
        said: Draft = self.then(self.text)
        return said


def bad_id(bad: int, *, tree: bool) -> Callable[[list[int]], Draft]:
    q = torch.full((64,), 1 / 64)
    draft = Draft((1, 2, bad), (-1, -1, 0), (None,) * 3) if tree else Draft.chain([1, bad], [q, q])
    return lambda text: draft


@pytest.mark.parametrize("settings", [{}, {"seed": 0, **SAMPLED}])
@pytest.mark.parametrize("tree", [True, False])
@pytest.mark.parametrize("bad", [-1, 64, 2**40])
def test_ids_outside_the_vocabulary_are_one_clear_error(bad: int, tree: bool, settings: dict[str, Any]) -> None:
    drafter = Says(bad_id(bad, tree=tree))
    with pytest.raises(ValueError, match="ids outside the target's vocabulary of 64"):
        generate(drafter, TREE if tree else CHAIN, **settings)


def test_a_wrong_table_of_ids_is_one_clear_error() -> None:
    ruined = small_heads("medusa", target(), draft_vocab=20, own_output=True)
    assert ruined.draft_ids is not None
    ruined.draft_ids.add_(60)
    with pytest.raises(ValueError, match="ids outside the target's vocabulary of 64"):
        generate(HeadsDrafter(ruined), CHAIN)


@pytest.mark.parametrize("nothing", [None, [1, 2], torch.tensor([1])])
def test_something_that_is_no_draft_is_one_clear_error(nothing: Any) -> None:
    with pytest.raises(ValueError, match=f"Says proposed a {type(nothing).__name__}, not a Draft"):
        generate(Says(lambda text: nothing), CHAIN)


# drafters that raise


class Trouble(Exception):
    """Of the drafter's own."""


class Raising(FakeDrafter):
    """Raises at some call of a method."""

    def __init__(self, method: str, call: int, error: BaseException) -> None:
        super().__init__((1, 2))
        self.method, self.left, self.error = method, call, error

    def _count(self, method: str) -> None:
        if method == self.method:
            self.left -= 1
            if self.left == 0:
                raise self.error

    def begin(self, target: Target, ids: Tensor, taps: Tensor | None) -> None:
        self._count("begin")
        super().begin(target, ids, taps)

    def commit(self, taps: Tensor | None, ids: list[int]) -> None:
        self._count("commit")
        super().commit(taps, ids)

    def draft(self, budget: Budget, sampler: Sampler | None) -> Draft:
        self._count("propose")
        right = plain()[len(self.text) :][:1]
        return Draft((*right, 5, 6), (-1, -1, 1), (None,) * 3) if right else Draft.empty()


WRAPS: dict[str, Callable[[Drafter], Drafter]] = {
    "alone": lambda drafter: drafter,
    "first": lambda drafter: FirstToSpeak([LookupDrafter(4), drafter]),
    "together": lambda drafter: Merged([LookupDrafter(1), drafter]),
}


@pytest.mark.parametrize("settings", [{}, {"seed": 0, **SAMPLED}])
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize(("method", "call"), [("begin", 1), ("propose", 1), ("propose", 3), ("commit", 2)])
def test_an_error_is_the_drafter_s_own_and_leaves_nothing_behind(
    method: str, call: int, wrap: str, settings: dict[str, Any]
) -> None:
    model = target().model
    before = model(PROMPT, output_hidden_states=True).logits  # transformers hooks its layers for this, for good
    hooks = [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()]
    drafter = WRAPS[wrap](Raising(method, call, Trouble("out of luck")))
    with pytest.raises(Trouble, match="out of luck"):
        generate(drafter, TREE, **settings)
    assert torch.equal(model(PROMPT).logits, before)
    assert [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()] == hooks
    assert generate(drafter, TREE).sequences[0].tolist() == plain()  # the same drafter, begun anew


def test_heads_that_raise_in_a_module() -> None:
    own, wanted = small_heads("eagle", target()), plain()
    own.train()

    def fail(*_: Any) -> None:
        raise Trouble("in a module")

    handle = next(own.children()).register_forward_hook(fail)
    with pytest.raises(Trouble, match="in a module"):
        generate(own, CHAIN)
    handle.remove()
    assert own.training  # as it was
    assert generate(own, CHAIN).sequences[0].tolist() == wanted
    assert not torch.nn.modules.module._global_forward_hooks


def test_an_interrupt_leaves_the_model_as_it_was() -> None:
    model = target().model
    before = model(PROMPT).logits
    drafter = Raising("propose", 3, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        generate(drafter, TREE)
    assert torch.equal(model(PROMPT).logits, before)
    assert generate(drafter, TREE).sequences[0].tolist() == plain()


def test_what_was_yielded_before_an_error_stands() -> None:
    decoding = Decoding(target(), PROMPT, Says(bad_id(-1, tree=False)), CHAIN, Stop(PROMPT.shape[1] + NEW))
    emitted: list[int] = []
    with pytest.raises(ValueError, match="ids outside"):
        for tokens in decoding.run():
            emitted += tokens
    assert emitted == plain()[PROMPT.shape[1] :][: len(emitted)] and len(emitted) >= 3
    assert decoding.tokens.view()[0].tolist() == plain()[: PROMPT.shape[1] + len(emitted)]


# drafts that are too long


class TooMuch(FakeDrafter):
    """The right text and far more, whatever it is asked for; as a tree with wrong tokens between."""

    def __init__(self, tree: bool) -> None:
        super().__init__(())
        self.tree = tree

    def draft(self, budget: Budget, sampler: Sampler | None) -> Draft:
        right = [*plain()[len(self.text) :], *range(40)]
        if not self.tree:
            return Draft.chain(right)
        tokens = [said for token in right for said in ((token + 1) % 64, token)]
        parents = [-1, -1, *(2 * (node // 2) + 1 for node in range(len(tokens) - 2))]
        return Draft(tuple(tokens), tuple(parents), (None,) * len(tokens))


@pytest.mark.parametrize("new", [1, 2, 3, 7, NEW])
@pytest.mark.parametrize("tree", [True, False])
def test_drafts_longer_than_asked_for_or_than_what_is_left(tree: bool, new: int) -> None:
    for budget in (CHAIN, TREE, STATIC):
        out = infer.generate(target(), PROMPT, TooMuch(tree), budget=budget, max_new_tokens=new)
        assert out.sequences[0].tolist() == plain()[: PROMPT.shape[1] + new]
        assert all(r.proposed < budget.rows and r.depth <= budget.depth for r in out.stats.log)
    out = infer.generate(target(), PROMPT, TooMuch(tree), budget=CHAIN, max_new_tokens=new, seed=0, **SAMPLED)
    assert out.sequences.shape[1] == PROMPT.shape[1] + new


@pytest.mark.parametrize("tree", [True, False])
def test_drafts_past_the_last_position(tree: bool) -> None:
    most = PROMPT.shape[1] + 5
    model = tiny_model("llama", max_position_embeddings=most)
    text = infer.generate(model, PROMPT, "none", max_length=most).sequences[0].tolist()
    out = infer.generate(model, PROMPT, TooMuch(tree), budget=Budget.chain(30), max_length=most)
    assert out.sequences[0].tolist() == text
