"""Everything that ends a text, as ``model.generate`` ends it, whatever was drafted beyond it."""

from __future__ import annotations

import copy
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria
from transformers.generation import stopping_criteria

import infer
from heads.grow import Budget
from tests.infer.fakes import Oracle, RandomTree
from tests.infer.test_greedy import greedy, random_heads
from tests.infer.test_stream import Script, scripted
from tests.tiny import tiny_model

PROMPT = torch.tensor([[7, 3, 44, 12]])
NEW = 24
TREE = Budget(rows=10, depth=4, width=3)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def text(model: Any) -> list[int]:
    return greedy(model, PROMPT, max_new_tokens=NEW)


def drafts(model: Any, text: list[int]) -> list[Any]:
    return [Oracle(text), RandomTree(text), random_heads(model, "medusa"), "lookup", "layers:0-1", "none"]


def check(model: Any, text: list[int], **settings: Any) -> list[int]:
    """What generate says and every draft must say too."""
    settings = {"do_sample": False, "pad_token_id": 0} | settings
    expected: list[int] = model.generate(PROMPT, **copy.deepcopy(settings))[0].tolist()
    for draft in drafts(model, text):
        budget = None if isinstance(draft, str) else Budget(rows=10, depth=3, width=3)
        out = infer.generate(model, PROMPT, draft, budget=budget, **copy.deepcopy(settings))
        assert out.sequences[0].tolist() == expected
        assert out.stats.tokens == len(expected) - PROMPT.shape[1]
    return expected


@pytest.mark.parametrize("cut", range(0, 24))
def test_a_stop_string_ends_the_text_wherever_blocks_end(cut: int) -> None:
    """The script is cut into drafts at every place in turn: the string lies inside one, or over the border of two."""
    model, tokenizer, script, say = scripted("some words and STOP here, then more")

    class Cut(Script):
        """Drafts up to a fixed place of the text, then on from there."""

        def draft(self, budget: Budget, sampler: Any) -> Any:
            room = cut + 2 - len(self.text)
            return super().draft(budget if room <= 0 else budget.within(room), sampler)

    settings: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False, "stop_strings": ["STOP", "zz"]}
    settings |= {"tokenizer": tokenizer, "logits_processor": [say]}
    prompt = torch.tensor([[1, 2]])
    out = infer.generate(model, prompt, Cut(script), budget=Budget.chain(40), **settings)
    assert out.texts == ["some words and STOP"]
    assert "".join(infer.stream(model, prompt, Cut(script), budget=Budget.chain(40), **settings)) == out.texts[0]


class Repeats(StoppingCriteria):
    """Ends when a token comes back; counts how often it is asked, and looks at the scores."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.lengths.append(input_ids.shape[1])
        row = input_ids[0].tolist()
        return torch.tensor([row[-1] in row[:-1]])


def test_criteria_are_asked_after_every_token_and_end_the_text_there(model: Any, text: list[int]) -> None:
    theirs = Repeats()
    expected = greedy(model, PROMPT, max_new_tokens=NEW, stopping_criteria=[theirs])
    assert len(expected) < len(text)
    for draft in drafts(model, text):
        ours = Repeats()
        budget = None if isinstance(draft, str) else Budget(rows=10, depth=3, width=3)
        out = infer.generate(
            model, PROMPT, draft, max_new_tokens=NEW, do_sample=False, budget=budget, stopping_criteria=[ours]
        )
        assert out.sequences[0].tolist() == expected
        assert ours.lengths == theirs.lengths, "asked once for each token, in order, as plain decoding asks"


@pytest.mark.parametrize("seconds", [0, 1, 5, 11])
def test_time_is_asked_after_every_token(
    model: Any, text: list[int], seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that moves on by one whenever it is read, the text ends where plain decoding ends it."""

    def started() -> None:
        monkeypatch.setattr(stopping_criteria, "time", SimpleNamespace(time=count().__next__))

    started()
    expected = greedy(model, PROMPT, max_new_tokens=NEW, max_time=float(seconds))
    assert len(expected) == PROMPT.shape[1] + seconds + 1
    for draft in (Oracle(text), RandomTree(text), "none"):
        started()
        out = infer.generate(model, PROMPT, draft, max_new_tokens=NEW, max_time=float(seconds), do_sample=False)
        assert out.sequences[0].tolist() == expected


def test_lengths(model: Any, text: list[int]) -> None:
    for new in (1, 2, 5, 11):
        check(model, text, max_new_tokens=new)
        check(model, text, max_length=PROMPT.shape[1] + new)
        check(model, text, max_length=999, max_new_tokens=new)
    refused: list[dict[str, Any]] = [{"max_length": PROMPT.shape[1]}, {"max_length": 2}, {"max_new_tokens": -1}]
    for wrong in refused:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            infer.generate(model, PROMPT, **wrong)


def test_several_ends_of_sequence_from_the_config_and_the_call(model: Any, text: list[int]) -> None:
    """As base generate: the model's own list, replaced by the call's; a tokenizer's end is not asked."""
    own = copy.deepcopy(model)
    later, sooner, other = text[12], text[8], text[6]
    own.generation_config.eos_token_id = [later, sooner]
    own.generation_config.pad_token_id = 0
    assert check(own, text, max_new_tokens=NEW)[-1] == sooner
    assert check(own, text, max_new_tokens=NEW, eos_token_id=[other, later])[-1] == other
    config = GenerationConfig(eos_token_id=[later], pad_token_id=0, max_new_tokens=NEW, do_sample=False)
    expected = own.generate(PROMPT, generation_config=config)
    assert torch.equal(infer.generate(own, PROMPT, Oracle(text), generation_config=config).sequences, expected)

    class Tokenizer:
        eos_token_id = other
        all_special_ids = (other,)
        pad_token_id = None

        def decode(self, ids: list[int], **options: Any) -> str:
            return str(ids)

    out = infer.generate(own, PROMPT, Oracle(text), tokenizer=Tokenizer(), max_new_tokens=NEW, do_sample=False)
    assert other in out.sequences[0].tolist()[PROMPT.shape[1] : -1] and int(out.sequences[0, -1]) == sooner


def test_ends_with_a_least_length(model: Any, text: list[int]) -> None:
    ends = sorted(set(text[PROMPT.shape[1] : PROMPT.shape[1] + 6]))
    for least in ({"min_new_tokens": 9}, {"min_length": PROMPT.shape[1] + 9}, {"min_new_tokens": 3}):
        check(model, text, max_new_tokens=NEW, eos_token_id=ends, **least)
    check(model, text, max_new_tokens=9, eos_token_id=ends, forced_eos_token_id=ends[0], min_new_tokens=5)


class Penalties(LogitsProcessor):
    """Frequency and presence penalties, which transformers has not; a user brings them."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.zeros_like(scores).scatter_add_(1, input_ids, torch.ones_like(input_ids, dtype=scores.dtype))
        return scores - 0.7 * counts - 1.5 * (counts > 0)


class InPlace:
    """Writes into the scores it is given, and remembers what it has seen."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(int(input_ids[0, -1]))
        scores[:, self.seen] -= 2.0
        return scores


def test_users_processors_with_and_without_a_state(model: Any, text: list[int]) -> None:
    changed = check(model, text, max_new_tokens=NEW, logits_processor=[Penalties()])
    assert changed != text
    theirs = InPlace()
    expected = greedy(model, PROMPT, max_new_tokens=NEW, logits_processor=[theirs])
    for draft in (Oracle(text), RandomTree(text), RandomTree(expected, seed=3), "lookup"):
        ours = InPlace()
        out = infer.generate(
            model, PROMPT, draft, max_new_tokens=NEW, do_sample=False, budget=TREE, logits_processor=[ours]
        )
        assert out.sequences[0].tolist() == expected
        assert ours.seen == theirs.seen, "rejected drafts leave no trace"


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty", "logit_bias", "stop"])
def test_what_servers_call_it_is_refused_by_name(model: Any, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        given: dict[str, Any] = {name: 0.5}
        infer.generate(model, PROMPT, max_new_tokens=3, **given)
