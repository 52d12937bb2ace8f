"""A target that does not read rows of a draft as it reads them one by one is refused, whatever its family is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, CpmAntConfig, MoshiConfig, PreTrainedModel
from transformers.models.llama import modeling_llama

import infer
from heads.target import Target
from infer import soundness
from infer.soundness import check_rows
from tests.tiny import FAMILIES, tiny_model

PROMPT = torch.tensor([[3, 9, 27, 17]])


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_families_known_to_be_right_pass(family: str, dtype: torch.dtype) -> None:
    check_rows(Target(tiny_model(family, dtype=dtype)))


def test_a_model_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target, asked = Target(tiny_model("llama")), []
    real = soundness._worst

    def watched(*args: Any) -> float:
        asked.append(args)
        return real(*args)

    monkeypatch.setattr(soundness, "_worst", watched)
    infer.generate(target, PROMPT, max_new_tokens=3, do_sample=False)
    assert len(asked) == 2
    infer.generate(target, PROMPT, "lookup", max_new_tokens=3, do_sample=False)
    assert len(asked) == 2


def ignores_masks(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row sees all that stands before it, as if there were chains only."""
    real = modeling_llama.create_causal_mask

    def causal(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **kwargs | {"attention_mask": None})

    monkeypatch.setattr(modeling_llama, "create_causal_mask", causal)


def ignores_positions(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rotary = model.model.rotary_emb
    real = rotary.forward
    monkeypatch.setattr(rotary, "forward", lambda x, position_ids: real(x, torch.zeros_like(position_ids)))


def counts_from_zero(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    rotary = model.model.rotary_emb
    real = rotary.forward
    monkeypatch.setattr(
        rotary, "forward", lambda x, position_ids: real(x, position_ids - position_ids.min(-1, keepdim=True).values)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("fault", "shape"), [(ignores_masks, "a tree"), (counts_from_zero, "a chain")])
def test_faults_are_refused(fault: Any, shape: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", dtype=dtype)
    fault(model, monkeypatch)
    with pytest.raises(ValueError, match=f"rows of {shape} read in one pass give other logits"):
        infer.generate(model, PROMPT, "lookup", max_new_tokens=3, do_sample=False)


def test_what_is_the_same_in_every_pass_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    ignores_positions(model, monkeypatch)
    check_rows(Target(model))


@pytest.mark.parametrize(
    "config",
    [
        CpmAntConfig(
            vocab_size=64, hidden_size=16, num_attention_heads=2, dim_head=8, dim_ff=32, num_hidden_layers=2,
            prompt_length=2, prompt_types=4,
        ),
        MoshiConfig(
            vocab_size=64, hidden_size=16, num_attention_heads=2, num_hidden_layers=2, ffn_dim=32,
            max_position_embeddings=64, head_dim=8,
        ),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_families_that_read_in_their_own_way_are_exact_or_refused(config: Any) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    try:
        ours = infer.generate(model, PROMPT, "lookup", max_new_tokens=12, do_sample=False).sequences
    except ValueError:
        return
    theirs = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=12, do_sample=False)
    assert torch.equal(ours, theirs)
