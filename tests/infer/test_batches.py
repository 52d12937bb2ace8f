"""Several texts in one call: each is decoded as it would be alone, whatever the others do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import infer
from heads.grow import Budget
from tests.infer.fakes import Oracle, RandomTree, Wrong
from tests.tiny import tiny_model

PROMPTS = [[7, 3, 44], [9], [5, 61, 7, 8, 22, 10, 11, 3, 2]]
NEW = 20


def rows() -> list[Tensor]:
    return [torch.tensor([prompt]) for prompt in PROMPTS]


def padded(pad: int = 0) -> tuple[Tensor, Tensor]:
    """The prompts as one tensor, padded on the left, and its attention mask."""
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS])
    return ids, mask


class Uneven(Oracle):
    """For the texts of a batch: the first fork drafts what the target will say, the next one noise, and so on."""

    def __init__(self, answers: list[list[int]]) -> None:
        super().__init__(answers[0])
        self.answers, self.forks = answers, 0

    def fork(self) -> Any:
        self.forks += 1
        return Wrong(self.answers[self.forks]) if self.forks == 1 else Oracle(self.answers[self.forks])


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma3", "mistral", "falcon"])
@pytest.mark.parametrize("budget", [Budget.chain(4), Budget(rows=9, depth=3, width=3)], ids=["chain", "tree"])
def test_each_row_is_what_it_would_be_alone(family: str, budget: Budget) -> None:
    own: dict[str, Any] = {"sliding_window": 8} if family == "mistral" else {}
    model = tiny_model(family, **own)
    alone = [
        model.generate(row, max_new_tokens=NEW - 5 * at, do_sample=False, pad_token_id=0)[0].tolist()
        for at, row in enumerate(rows())
    ]
    ids, mask = padded()
    drafter = Uneven(alone) if budget.width == 1 else RandomTree(alone[0])
    out = infer.generate(model, ids, drafter, attention_mask=mask, max_new_tokens=NEW, do_sample=False, budget=budget)
    assert out.sequences.shape == (3, ids.shape[1] + NEW)
    for at, row in enumerate(out.sequences.tolist()):
        start = ids.shape[1] - len(PROMPTS[at])
        assert row[start : start + len(alone[at])] == alone[at]
    assert [stats.tokens for stats in out.row_stats] == [NEW] * 3
    assert out.stats.tokens == 3 * NEW


def test_rows_that_end_leave_and_are_padded() -> None:
    model = tiny_model("llama")
    ids, mask = padded()
    plain = infer.generate(model, ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False).sequences
    end = int(plain[0, ids.shape[1] + 4])
    settings: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False, "eos_token_id": end}
    expected = model.generate(ids, pad_token_id=0, **settings)
    out = infer.generate(model, ids, pad_token_id=0, **settings)
    assert torch.equal(out.sequences, expected)
    assert out.row_stats[0].tokens <= 5 < max(stats.tokens for stats in out.row_stats)


def test_prompts_of_one_length_and_scores_as_generate_gives_them() -> None:
    model, ids = tiny_model("qwen3"), torch.tensor([[3, 5, 9], [44, 7, 1]])
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "repetition_penalty": 1.3, "pad_token_id": 0}
    more: dict[str, Any] = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(ids, **settings, **more)
    out = infer.generate(model, ids, RandomTree([1] * 40), budget=Budget(rows=6, depth=2, width=2), **settings, **more)
    assert torch.equal(out.sequences, expected.sequences)
    for ours, theirs in ((out.scores, expected.scores), (out.logits, expected.logits)):
        assert ours is not None and len(ours) == len(theirs) == 8
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(ours, theirs, strict=True))


def test_seeds_by_text_and_answers_by_prompt() -> None:
    model, ids = tiny_model("llama"), torch.tensor([[3, 5, 9]])
    sampled: dict[str, Any] = {"do_sample": True, "max_new_tokens": 12, "top_k": 0}
    many = infer.generate(model, ids, num_return_sequences=3, seed=[4, 5, 6], **sampled)
    single = [infer.generate(model, ids, seed=seed, **sampled).sequences[0] for seed in (4, 5, 6)]
    assert torch.equal(many.sequences, torch.stack(single))
    assert torch.equal(infer.generate(model, ids, num_return_sequences=3, seed=4, **sampled).sequences, many.sequences)
    with pytest.raises(ValueError, match="2 seeds were given for 3 texts"):
        infer.generate(model, ids, num_return_sequences=3, seed=[4, 5], **sampled)


def test_a_processor_with_a_state_has_one_for_each_text() -> None:
    class Alternate:
        """Allows even and odd tokens in turn; counts its calls."""

        calls = 0

        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            self.calls += 1
            return scores.masked_fill(torch.arange(scores.shape[-1]) % 2 == self.calls % 2, float("-inf"))

    model, given = tiny_model("llama"), Alternate()
    out = infer.generate(
        model, padded()[0], attention_mask=padded()[1], logits_processor=[given], max_new_tokens=9, do_sample=False
    )
    assert all([token % 2 for token in row[-9:]] == [at % 2 for at in range(9)] for row in out.sequences.tolist())
    assert given.calls == 0, "the texts work on copies"


def test_which_tokens_are_allowed_may_depend_on_the_row() -> None:
    model = tiny_model("llama")
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    allowed = {0: [1, 2, 3], 1: [10, 11, 12], 2: [20, 21]}
    given: dict[str, Any] = {"prefix_allowed_tokens_fn": lambda row, ids: allowed[row], "attention_mask": padded()[1]}
    out = infer.generate(model, padded()[0], **given, **settings)
    assert torch.equal(out.sequences, model.generate(padded()[0], **given, **settings))


def test_texts_cannot_be_streamed_together() -> None:
    with pytest.raises(ValueError, match="3 texts cannot be streamed together"):
        infer.generate(tiny_model("llama"), padded()[0], stream=print, tokenizer=object(), max_new_tokens=3)
