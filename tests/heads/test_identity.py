"""Who a target is: told apart from others by its sizes, weights and adapter, and not by its name or dtype."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from heads.identity import TargetIdentity
from heads.target import Target, TargetMismatch
from tests.heads.small import check_tree, random_ids, relative, small_target
from tests.tiny import tiny_model


def test_identity_does_not_depend_on_the_dtype_it_is_loaded_in() -> None:
    names = {
        dtype: Target(tiny_model("llama", dtype=torch.bfloat16).to(dtype), name="same").identity()
        for dtype in (torch.bfloat16, torch.float32, torch.float64)
    }
    assert len(set(map(str, names.values()))) == 1
    # weights that bfloat16 does not hold: a file of float32 read as it is, or rounded on the way in
    assert (
        Target(tiny_model("llama", dtype=torch.float32), name="same").identity().weights
        == Target(tiny_model("llama", dtype=torch.float32).to(torch.bfloat16), name="same").identity().weights
    )


def test_identity_is_stored_whole() -> None:
    identity = small_target().identity()
    assert TargetIdentity.from_dict(identity.to_dict()) == identity
    assert identity.fields["hidden_size"] == 32 and identity.fields["model_type"] == "llama"
    assert identity.quantizer is None and identity.adapter is None
    stored = identity.to_dict()
    del stored["weights"]
    with pytest.raises(ValueError, match=r"missing fields \['weights'\] and unknown fields \['weight'\]"):
        TargetIdentity.from_dict({**stored, "weight": "x"})


def test_mismatches_name_the_fields_and_both_values() -> None:
    theirs = Target(tiny_model("llama"), name="org/theirs").identity()
    wide = Target(tiny_model("llama", hidden_size=64, head_dim=16), name="org/wide")
    with pytest.raises(TargetMismatch) as caught:
        wide.check(theirs)
    message = str(caught.value)
    assert "hidden_size 32 there, 64 here" in message and "head_dim 8 there, 16 here" in message
    assert "org/theirs" in message and "org/wide" in message and "allow_mismatch" in message
    assert "vocab_size" not in message and "weights" not in message
    wide.check(theirs, allow_mismatch=True)


def test_other_weights_of_the_same_shape_are_another_target() -> None:
    theirs = small_target().identity()
    with pytest.raises(TargetMismatch, match="same shape but other weights"):
        Target(tiny_model("llama", seed=1)).check(theirs)
    Target(tiny_model("llama"), name="moved/elsewhere").check(theirs)  # a name is not an identity


@pytest.mark.parametrize("part", ["embedding", "layer", "output"])
def test_each_sampled_part_counts(part: str) -> None:
    target = Target(tiny_model("llama"))
    before = target.identity().weights
    weight = {
        "embedding": target.embedding.weight,
        "layer": target.layers[2].get_parameter("mlp.down_proj.weight"),
        "output": target.output.weight,
    }[part]
    with torch.no_grad():
        weight[0, 0] += 1
    assert Target(target.model).identity().weights != before


def test_every_weight_is_in_the_hash_of_all() -> None:
    target = Target(tiny_model("llama"))
    before = target.weights_hash()
    assert Target(tiny_model("llama")).weights_hash() == before
    for parameter in target.model.parameters():
        with torch.no_grad():
            parameter.view(-1)[-1] += 1
        assert target.weights_hash() != before
        with torch.no_grad():
            parameter.view(-1)[-1] -= 1
            parameter.copy_(parameter)


# adapters and padded vocabularies


def adapted(modules: list[str], seed: int = 0) -> PreTrainedModel:
    """A LoRA-wrapped model whose B is random, so that the adapter does something."""
    torch.manual_seed(seed)
    model = get_peft_model(tiny_model("llama"), LoraConfig(r=2, lora_alpha=4, target_modules=modules))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    return model.double()  # type: ignore[return-value]


@pytest.mark.parametrize("modules", [["q_proj", "v_proj"], ["down_proj", "lm_head"]], ids=["layers", "output matrix"])
def test_an_adapted_target_is_read_with_its_adapter_on(modules: list[str]) -> None:
    model = adapted(modules)
    target, ids = Target(model), random_ids(12)
    out = target.forward(ids, taps=(1, 2), hidden=True, logits_to_keep=3)
    theirs = model(ids, output_hidden_states=True)
    with model.disable_adapter():  # type: ignore[operator]
        bare = model(ids).logits
    assert relative(theirs.logits, bare) > 1e-3
    assert out.taps is not None and out.hidden is not None
    assert torch.equal(out.taps, torch.cat([theirs.hidden_states[1], theirs.hidden_states[2]], -1))
    assert relative(out.logits, theirs.logits[:, -3:]) <= 1e-12
    assert relative(target.project(out.hidden), theirs.logits) <= 1e-12
    rows = torch.tensor([2, 5, 7])
    assert relative(target.project_rows(out.hidden, rows), theirs.logits[..., rows]) <= 1e-12
    target.self_check()
    check_tree(target, 9)


def test_an_adapter_is_part_of_the_identity() -> None:
    plain = Target(tiny_model("llama")).identity()
    one, two = (Target(adapted(["q_proj", "v_proj"], seed)).identity() for seed in (1, 2))
    assert plain.adapter is None and one.adapter and two.adapter and one.adapter != two.adapter
    assert one.weights == two.weights == plain.weights, "the base is the same"
    assert one.fields == plain.fields
    with pytest.raises(TargetMismatch, match=r"adapter '\w+' there, None here"):
        Target(tiny_model("llama")).check(one)
    Target(adapted(["q_proj", "v_proj"], 1)).check(one)


def test_a_padded_vocabulary_counts_the_rows_of_the_output_matrix() -> None:
    model = tiny_model("llama", vocab=60)
    model.resize_token_embeddings(64, mean_resizing=False)
    target = Target(model)
    assert target.vocab_size == 64
    hidden = target.forward(random_ids(3, vocab=60), hidden=True).hidden
    assert isinstance(hidden, Tensor) and target.project(hidden).shape == (1, 3, 64)
