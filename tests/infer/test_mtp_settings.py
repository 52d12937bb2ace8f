"""Heads that draft inside the pass under the settings of ``model.generate``: processors, stops, the last position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import infer
from heads.grow import Budget
from heads.mtp import Mtp
from infer.processors import NodeScores
from tests.heads.inside import small_mtp
from tests.infer.test_mtp import BUDGETS, NEW, PROMPT, RAGGED, greedy, riding, target_of

PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.7},
    "no token twice": {"no_repeat_ngram_size": 1},
    "bad words": {"bad_words_ids": [[5], [30, 21], [7]]},
    "all at once": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 9, "eos_token_id": 11},
}


def texts(made: Mtp, budget: Budget | None, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model says by itself, and with drafts that are often right."""
    model, settings = made.target.model, {"pad_token_id": 0, **settings}
    wanted = greedy(model, **settings)
    drafts = riding(made, wanted, 3)
    out = infer.generate(model, PROMPT, drafts, budget=budget, max_new_tokens=NEW, do_sample=False, **settings)
    assert out.stats.accepted > 2 and any(r.rows > 1 + r.proposed for r in out.stats.log)
    return wanted, out.sequences


@pytest.mark.parametrize("case", PROCESSORS)
def test_processors_see_the_text_of_each_node_and_no_masks(case: str) -> None:
    made = small_mtp(target_of("llama"))
    for budget in (None, BUDGETS["tree"]):
        wanted, ours = texts(made, budget, **PROCESSORS[case])
        assert torch.equal(ours, wanted)
    assert not torch.equal(wanted, greedy(made.target.model)), "the setting matters here"


def test_scores_of_another_nodes_text_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake that the processors above stand against: penalties that see the committed text alone."""
    monkeypatch.setattr(
        NodeScores, "_seen_by", lambda self, node: (self._tokens.view(), self.logits[node + 1 : node + 2].clone())
    )
    made = small_mtp(target_of("llama"))
    wanted, ours = texts(made, BUDGETS["tree"], **PROCESSORS["no token twice"])
    assert not torch.equal(ours, wanted)


@pytest.mark.parametrize("at", [1, 2, 3, 5, 8])
def test_a_text_ends_where_the_target_would_end_it(at: int) -> None:
    """At an end token wherever in a draft it stands, and nothing behind it is counted."""
    made = small_mtp(target_of("qwen3"))
    stop = int(greedy(made.target.model)[0, PROMPT.shape[1] + at])
    for budget in BUDGETS.values():
        settings: dict[str, Any] = {"eos_token_id": stop, "pad_token_id": 0, "do_sample": False}
        wanted = made.target.model.generate(PROMPT, max_new_tokens=NEW, **settings)
        whole = greedy(made.target.model)  # drafts go on behind the end
        out = infer.generate(
            made.target.model, PROMPT, riding(made, whole, at), budget=budget, max_new_tokens=NEW, **settings
        )
        assert torch.equal(out.sequences, wanted)
        assert out.stats.tokens == wanted.shape[1] - PROMPT.shape[1] <= at + 1
        assert 1 + sum(r.emitted for r in out.stats.log) == out.stats.tokens


@pytest.mark.parametrize("new", [1, 2, 3, 4, 7])
def test_no_token_more_than_asked_for(new: int) -> None:
    made = small_mtp(target_of("llama"))
    whole = greedy(made.target.model)
    for budget in BUDGETS.values():
        out = infer.generate(
            made.target.model, PROMPT, riding(made, whole, new), budget=budget, max_new_tokens=new, do_sample=False
        )
        assert torch.equal(out.sequences, whole[:, : PROMPT.shape[1] + new])


class Until(StoppingCriteria):
    """Stops a text behind a token, as a caller's own criterion does."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, ids: torch.Tensor, scores: Any, **rest: Any) -> torch.Tensor:
        return ids[:, -1] == self.token


def test_a_callers_own_criterion_is_asked_for_every_token() -> None:
    made = small_mtp(target_of("llama"))
    whole = greedy(made.target.model)
    until = StoppingCriteriaList([Until(int(whole[0, PROMPT.shape[1] + 4]))])
    settings: dict[str, Any] = {"stopping_criteria": until, "max_new_tokens": NEW, "do_sample": False}
    wanted = made.target.model.generate(PROMPT, **settings)
    out = infer.generate(made.target.model, PROMPT, riding(made, whole, 2), budget=BUDGETS["tree"], **settings)
    assert torch.equal(out.sequences, wanted) and wanted.shape[1] < whole.shape[1]


def test_texts_of_a_batch_end_apart() -> None:
    """One is over early; rows of the others, masks included, stay where they belong."""
    made = small_mtp(target_of("llama"))
    mask = (RAGGED != 0).long()
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    whole = made.target.model.generate(RAGGED, **settings)
    settings["eos_token_id"] = int(whole[1, RAGGED.shape[1] + 3])
    wanted = made.target.model.generate(RAGGED, **settings)
    for budget in BUDGETS.values():
        out = infer.generate(made.target.model, RAGGED, made, budget=budget, **settings)
        assert torch.equal(out.sequences, wanted)
