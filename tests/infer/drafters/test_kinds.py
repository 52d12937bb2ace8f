"""Decoding with each kind of heads: the target's own text in three families over either cache, and its law.

Random heads show that nothing wrong is ever let through; heads that learnt one text by heart, that what they get right
is accepted, whole drafts at a time.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import infer
from heads.draft import Draft
from heads.grow import Budget
from heads.target import Target
from infer.verify import RULES, Chooser
from tests.heads.small import memorized, small_heads
from tests.infer.exact import Drawing, Make, Text, World, check_law
from tests.tiny import tiny_model

CASES: dict[str, dict[str, Any]] = {
    "medusa": {"kind": "medusa"},
    "eagle": {"kind": "eagle"},
    "eagle 3.1": {"kind": "eagle", "fc_norm": True, "norm_output": True},
    "eagle1": {"kind": "eagle1"},
    "hydra": {"kind": "hydra"},
    "block": {"kind": "block"},
    "block without a bias": {"kind": "block", "markov_rank": 0},
}
PROMPTS = ((7, 3, 44), (9,), (5, 61, 7, 8, 22, 10, 11, 3, 2))
BUDGETS = {"chain": Budget.chain(3), "tree": Budget(10, 3, 3)}
NEW = 12


@cache
def greedy(family: str, prompt: tuple[int, ...], new: int = NEW) -> list[int]:
    """What the target says by itself."""
    text: list[int] = (
        tiny_model(family).generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False)[0].tolist()
    )
    return text


@pytest.mark.parametrize("cache_implementation", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("case", CASES)
def test_three_ragged_prompts_get_the_targets_greedy_text(case: str, family: str, cache_implementation: str) -> None:
    model = tiny_model(family)
    made = small_heads(target=Target(model), draft_vocab=40, **CASES[case])
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(p)) + [*p] for p in PROMPTS])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS])
    for budget in BUDGETS.values():
        out = infer.generate(
            model, ids, made, attention_mask=mask, budget=budget, cache_implementation=cache_implementation,
            max_new_tokens=NEW, do_sample=False, pad_token_id=0,
        )  # fmt: skip
        for at, prompt in enumerate(PROMPTS):
            assert out.sequences[at, width - len(prompt) :].tolist() == greedy(family, prompt)


@pytest.mark.parametrize("case", CASES)
def test_heads_that_know_the_text_are_believed(case: str) -> None:
    """Chains are accepted whole, trees too, and a text they do not know is still the target's."""
    model = tiny_model("llama")
    text = greedy("llama", PROMPTS[2], 24)
    every_row = {"anchors": 1.0} if CASES[case]["kind"] == "block" else {}
    made = memorized(CASES[case] | every_row, Target(model), text)
    for budget, least in ((Budget.chain(3), 2.2), (Budget(12, 3, 3), 2.7)):
        out = infer.generate(model, torch.tensor([PROMPTS[2]]), made, max_new_tokens=24, do_sample=False, budget=budget)
        assert out.sequences[0].tolist() == text
        assert out.stats.tokens_per_round > least
        other = infer.generate(
            model, torch.tensor([PROMPTS[0]]), made, max_new_tokens=NEW, do_sample=False, budget=budget
        )
        assert other.sequences[0].tolist() == greedy("llama", PROMPTS[0])


# the law, over every branch


def drafting(case: str, world: World, budget: Budget, *, draw: bool) -> Make:
    """Drafts of real heads over the world's tokens, drawn by a chooser or the likeliest."""
    target = Target(tiny_model("llama", vocab=world.vocab))
    made = small_heads(target=target, seed=2, **CASES[case])
    width = len(made.config.taps) * target.hidden_size
    taps = torch.randn(1, 3, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def make(chooser: Chooser, text: Text) -> Draft:
        state = made.start(taps, torch.tensor([[0, 0, 0, text[-1]]]))
        return made.propose(state, budget, Drawing(chooser) if draw else None)

    return make


@pytest.mark.parametrize("rule", ["token", "block", "traversal"])
@pytest.mark.parametrize("case", CASES)
def test_the_law_of_sampled_chains(case: str, rule: str) -> None:
    world = World(3, seed=1)
    check_law(RULES[rule], drafting(case, world, Budget.chain(2), draw=True), world, 4, rejected=0.2)


@pytest.mark.parametrize("rule", ["token", "traversal"])
@pytest.mark.parametrize("case", CASES)
def test_the_law_of_sampled_trees(case: str, rule: str) -> None:
    world = World(3, seed=1)
    check_law(RULES[rule], drafting(case, world, Budget(5, 2, 2), draw=True), world, 4, rejected=0.2)


@pytest.mark.parametrize("rule", ["siblings", "token", "traversal"])
@pytest.mark.parametrize("case", CASES)
def test_the_law_of_chosen_trees(case: str, rule: str) -> None:
    world = World(4, seed=1)
    check_law(RULES[rule], drafting(case, world, Budget(5, 3, 2), draw=False), world, 5, rejected=0.1)


@pytest.mark.parametrize("case", CASES)
def test_a_q_told_without_its_path_would_show(case: str) -> None:
    """The mistake against which the law stands: every node is said to be drawn from what followed the root."""
    world = World(3, seed=1)
    honest = drafting(case, world, Budget.chain(2), draw=True)

    def make(chooser: Chooser, text: Text) -> Draft:
        draft = honest(chooser, text)
        return Draft(draft.tokens, draft.parents, (draft.q[0],) * len(draft))

    with pytest.raises(AssertionError, match="largest difference"):
        check_law(RULES["token"], make, world, 4)


def test_every_kind_is_here() -> None:
    from heads.kinds import KINDS

    # mtp drafts behind a first pass with masks: the same is asked of it in tests/infer/test_mtp.py and test_mtp_law.py
    assert {str(case["kind"]) for case in CASES.values()} | {"mtp"} == KINDS.keys()
