"""Where ``model.generate`` itself is not what one would expect: the smallest input, and what is done here.

These are the differences that comparing random configurations found; everything else was equal. A test that fails with
a newer transformers says that a difference is gone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

import infer
from tests.tiny import tiny_model

PADDED = torch.tensor([[0, 0, 7, 3, 44]])
MASK = (PADDED != 0).long()


def test_eager_attention_in_float64_is_nan_for_padded_rows() -> None:
    """A padding row sees nothing: the lowest float64 added to all its scores is −inf for the float32 softmax."""
    eager, sdpa = tiny_model("llama", attention="eager"), tiny_model("llama", attention="sdpa")
    assert bool(eager(PADDED, attention_mask=MASK).logits.isnan().any())
    right = sdpa.generate(PADDED, attention_mask=MASK, max_new_tokens=8, do_sample=False, pad_token_id=0)
    ours = infer.generate(eager, PADDED, attention_mask=MASK, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(ours.sequences, right)
    theirs = eager.generate(PADDED, attention_mask=MASK, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert theirs[0, 5:].tolist() == [0] * 8, "the arg-max of NaN"


class Odd(StoppingCriteria):
    """Ends a text at an odd token."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -1] % 2 == 1


def test_rows_ended_by_a_criterion_go_on_where_there_is_no_end_of_sequence() -> None:
    """transformers pads an ended row only when there is an end-of-sequence id; here it always is."""
    model = tiny_model("llama")
    ids = torch.tensor([[9, 30, 30], [9, 30, 6]])
    alone = [model.generate(row[None], max_new_tokens=12, do_sample=False, stopping_criteria=[Odd()]) for row in ids]
    lengths = [row.shape[1] for row in alone]
    assert lengths[0] != lengths[1]
    asked: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "stopping_criteria": [Odd()]}
    theirs, ours = model.generate(ids, **asked), infer.generate(model, ids, **asked).sequences
    assert ours.shape == theirs.shape
    for at, length in enumerate(lengths):
        assert ours[at, :length].tolist() == theirs[at, :length].tolist() == alone[at][0].tolist()
    short = lengths.index(min(lengths))
    assert ours[short, lengths[short] :].tolist() == [0] * (max(lengths) - min(lengths))
    assert theirs[short, lengths[short] :].tolist() != [0] * (max(lengths) - min(lengths))
    asked["eos_token_id"] = 63
    assert torch.equal(infer.generate(model, ids, **asked).sequences, model.generate(ids, **asked))
