"""The tiny targets are fit to test with: reproducible, with clear winners and text that varies."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import FAMILIES, SEQ2SEQ, tiny_model, tiny_seq2seq


@pytest.mark.parametrize("family", FAMILIES)
def test_arg_max_is_clear_and_text_varies(family: str) -> None:
    model = tiny_model(family)
    ids = torch.randint(0, 64, (1, 8))
    out = model.generate(ids, max_new_tokens=48, do_sample=False, return_dict_in_generate=True, output_logits=True)
    best = torch.stack(out.logits, 1)[0].topk(2).values
    assert out.sequences.shape[1] == 56, "nothing ends its text"
    assert (best[:, 0] - best[:, 1]).min() > 1e-4
    assert out.sequences[0, 8:].unique().numel() >= 5


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_encoder_decoders_say_what_their_prompt_and_their_text_make_them_say(family: str) -> None:
    model = tiny_seq2seq(family)
    one, other = torch.randint(2, 64, (2, 1, 8))
    out = model.generate(one, max_new_tokens=40, do_sample=False, return_dict_in_generate=True, output_logits=True)
    best = torch.stack(out.logits, 1)[0].topk(2).values
    assert out.sequences.shape == (1, 41) and out.sequences[0, 0] == 0
    assert (best[:, 0] - best[:, 1]).min() > 1e-4
    assert out.sequences[0].unique().numel() >= 5
    assert not torch.equal(out.sequences, model.generate(other, max_new_tokens=40, do_sample=False))


def test_the_same_arguments_give_the_same_model() -> None:
    one, same, other = tiny_model("llama"), tiny_model("llama"), tiny_model("llama", seed=1)
    first = [dict(model.named_parameters())["model.layers.0.mlp.up_proj.weight"] for model in (one, same, other)]
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])
    assert torch.equal(tiny_model("llama", dtype=torch.float32).lm_head.weight, one.lm_head.weight.float())
