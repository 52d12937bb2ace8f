"""What EAGLE-3 checkpoints of others do that must not pass unnoticed: each trap is read rightly, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from heads.formats import FormatError, export_heads, read_heads
from heads.target import Target
from tests.heads.formats.cases import OTHER
from tests.heads.formats.edit import WEIGHTS, eagle, medusa, read, reconfigure, refused, rewrite
from tests.heads.small import logits_of, small_heads, small_target
from tests.tiny import tiny_model

# strictness


def test_missing_renamed_extra_and_misshapen_tensors_are_all_listed(tmp_path: Path) -> None:
    eagle(tmp_path / "out")

    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["midlayer.self_attn.o_proj.weight"]
        tensors["midlayer.mlp.down.weight"] = tensors.pop("midlayer.mlp.down_proj.weight")
        tensors["norm.weight"] = torch.ones(31)
        tensors["base.lm_head.weight"] = torch.ones(2)

    rewrite(tmp_path / "out", change)
    with pytest.raises(FormatError) as caught:
        read(tmp_path / "out")
    message = str(caught.value)
    assert "missing midlayer.mlp.down_proj.weight, midlayer.self_attn.o_proj.weight" in message
    assert "unexpected base.lm_head.weight, midlayer.mlp.down.weight" in message
    assert "norm.weight is (31,) where (32,) is expected" in message and "tiny/llama" in message


@pytest.mark.parametrize("name", ["fc.bias", "midlayer.self_attn.q_proj.bias", "midlayer.self_attn.q_norm.weight"])
def test_a_part_that_our_layer_lacks_is_unexpected_whatever_the_config_says(name: str, tmp_path: Path) -> None:
    eagle(tmp_path / "out")
    rewrite(tmp_path / "out", lambda tensors: tensors.update({name: torch.ones(32)}))
    refused(tmp_path / "out", f"unexpected {name}")


def test_weights_that_are_no_floats_or_not_finite_are_refused(tmp_path: Path) -> None:
    eagle(tmp_path / "out")
    kept = load_file(tmp_path / "out" / WEIGHTS)["fc.weight"]
    rewrite(tmp_path / "out", lambda tensors: tensors.update({"fc.weight": kept.to(torch.int8)}))
    refused(tmp_path / "out", "fc.weight is stored as int8, not as floats")
    kept[3, 3] = float("nan")
    rewrite(tmp_path / "out", lambda tensors: tensors.update({"fc.weight": kept}))
    refused(tmp_path / "out", "fc.weight holds values that are not finite")


def test_heads_for_another_size_name_both(tmp_path: Path) -> None:
    eagle(tmp_path / "out")
    wide = Target(tiny_model("llama", layers=8, hidden_size=64, head_dim=16), name="org/wide")
    with pytest.raises(FormatError, match=r"hidden_size is 32 in its config, 32 in fc\.weight, 64 in org/wide"):
        read_heads(tmp_path / "out", wide)
    reconfigure(tmp_path / "out", hidden_size=64)
    refused(tmp_path / "out", r"hidden_size is 64 in its config, 32 in fc\.weight, 32 in tiny/llama")
    medusa(tmp_path / "medusa")
    with pytest.raises(FormatError, match=r"0\.0\.linear\.weight is \(32, 32\) where \(64, 64\) is expected"):
        read_heads(tmp_path / "medusa", wide)


# EAGLE-3's settings


@pytest.mark.parametrize("theta", [None, "old", "new"])
def test_the_rotary_base_is_10000_when_the_config_is_silent_whatever_the_targets_is(
    theta: str | None, tmp_path: Path
) -> None:
    eagle(tmp_path / "out", rope_theta=777.0)
    said: dict[str, Any] = {"rope_theta": 777.0} if theta == "old" else {}
    said = {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}} if theta == "new" else said
    reconfigure(tmp_path / "out", drop=("rope_theta", "rope_scaling"))
    reconfigure(tmp_path / "out", **said)
    other = Target(tiny_model("llama", layers=8, rope_parameters={"rope_type": "default", "rope_theta": 5e5}))
    assert read_heads(tmp_path / "out", other).heads.config.options["rope_theta"] == (777.0 if theta else 10000.0)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_stretched_positions_are_refused(key: str, tmp_path: Path) -> None:
    eagle(tmp_path / "out")
    values: dict[str, Any] = {key: {"rope_type": "llama3", "factor": 8.0}}
    reconfigure(tmp_path / "out", **values)
    refused(tmp_path / "out", f"{key} in the config.json of .* is of type 'llama3'")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"norm_before_residual": True}, "norm_before_residual is true"),
        ({"norm_before_fc": True}, "norm_before_fc is true"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"eagle_config": {"norm_before_fc": True}}, "norm_before_fc is True"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"draft_vocab_size": 30}, "draft_vocab_size is 30 and lm_head.weight has 20 rows"),
        ({"target_hidden_size": 64}, "all must be the same"),
        ({"num_attention_heads": 8}, "num_attention_heads is 8 with head_dim 8, .* has 32 rows"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4 with head_dim 8, .* has 16 rows"),
        ({"head_dim": 5}, "with head_dim 5"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number, not '-1'"),
        ({"rope_theta": "high"}, "rope_theta must be a positive number, not 'high'"),
        ({"rope_scaling": 3}, "rope_scaling must be an object"),
        ({"norm_output": 1}, "norm_output must be true or false"),
        ({"eagle_aux_hidden_state_layer_ids": "2,4"}, "must be a list of integers"),
        ({"fc_norm": True}, r"missing fc_norm\.0\.weight, fc_norm\.1\.weight, fc_norm\.2\.weight"),
    ],
)
def test_settings_that_our_layer_cannot_have_are_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    eagle(tmp_path / "out")
    reconfigure(tmp_path / "out", **values)
    refused(tmp_path / "out", message)


def test_counts_come_from_the_tensors_when_the_config_is_silent(tmp_path: Path) -> None:
    made = eagle(tmp_path / "out", num_key_value_heads=1, intermediate_size=24)
    silent = ("num_key_value_heads", "head_dim", "intermediate_size", "draft_vocab_size", "hidden_size", "vocab_size")
    reconfigure(tmp_path / "out", drop=silent)
    assert torch.equal(logits_of(read(tmp_path / "out", lookahead=3)), logits_of(made))
    reconfigure(tmp_path / "out", drop=("num_attention_heads",))
    refused(tmp_path / "out", "lacks num_attention_heads: add it")


def test_the_layer_may_stand_under_either_name(tmp_path: Path) -> None:
    made = eagle(tmp_path / "out")

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("midlayer.")]:
            tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)

    rewrite(tmp_path / "out", rename)
    assert torch.equal(logits_of(read(tmp_path / "out", lookahead=3)), logits_of(made))
    rewrite(tmp_path / "out", lambda tensors: tensors.update({"layers.1.mlp.up_proj.weight": torch.ones(1)}))
    refused(tmp_path / "out", "more than one decoder layer")


# taps


def test_named_layers_are_read_as_the_engine_counts_them(tmp_path: Path) -> None:
    made = small_heads(target=small_target(layers=8), **OTHER)
    export_heads(made, "eagle3", tmp_path / "out", engine="sglang")
    refused(
        tmp_path / "out", r"layers \[0, 2, 6\], which are hidden states \[0, 2, 6\] for vLLM and \[1, 3, 7\] for SG"
    )
    assert read(tmp_path / "out", engine="sglang").config.taps == (1, 3, 7)
    assert read(tmp_path / "out", engine="vllm").config.taps == (0, 2, 6)
    with pytest.raises(FormatError, match="unknown engine 'tgi'"):
        read(tmp_path / "out", engine="tgi")


def test_taps_that_the_weights_or_the_target_lack_are_refused(tmp_path: Path) -> None:
    eagle(tmp_path / "out")
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3]}
    reconfigure(tmp_path / "out", eagle_config=ids)
    refused(tmp_path / "out", r"fc\.weight reads 96 numbers, 3 taps of 32, and the taps are \[1, 3\]", engine="vllm")
    reconfigure(tmp_path / "out", eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 90]})
    with pytest.raises(ValueError, match=r"taps \[90\] are not hidden states 0 to 8"):
        read(tmp_path / "out", engine="vllm")


@pytest.mark.parametrize("layers", [2, 3, 4, 5, 6])
def test_default_taps_of_shallow_targets_are_refused(layers: int, tmp_path: Path) -> None:
    """2, n/2 and n - 3 are negative or the same there: [2, 1, -1], [2, 1, 0], [2, 2, 1], [2, 2, 2], [2, 3, 3]."""
    eagle(tmp_path / "out")
    with pytest.raises(ValueError, match=f"a target of {layers} layers has no three distinct taps"):
        read_heads(tmp_path / "out", small_target(layers=layers))


# the draft vocabulary


def test_offsets_become_target_ids(tmp_path: Path) -> None:
    eagle(tmp_path / "out", draft_vocab=3)

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["d2t"] = torch.tensor([2, 4, 5])
        tensors["t2d"] = torch.zeros(64, dtype=torch.bool).index_fill_(0, torch.tensor([2, 5, 7]), True)

    rewrite(tmp_path / "out", change)
    assert read(tmp_path / "out").target_ids.tolist() == [2, 5, 7]


def test_a_map_out_of_order_is_sorted_with_its_rows(tmp_path: Path) -> None:
    made = eagle(tmp_path / "out")
    shuffle = torch.randperm(20, generator=torch.Generator().manual_seed(0))

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["d2t"] = (torch.arange(20) + tensors["d2t"])[shuffle] - torch.arange(20)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][shuffle]

    rewrite(tmp_path / "out", change)
    back = read(tmp_path / "out", lookahead=3)
    assert torch.equal(back.target_ids, made.target_ids) and torch.equal(logits_of(back), logits_of(made))


def test_a_map_over_the_whole_vocabulary_is_no_reduction(tmp_path: Path) -> None:
    made = eagle(tmp_path / "out", draft_vocab=None)
    rewrite(tmp_path / "out", lambda tensors: tensors.update({"d2t": torch.zeros(64, dtype=torch.int64)}))
    back = read(tmp_path / "out", lookahead=3)
    assert back.config.draft_vocab_size is None and torch.equal(logits_of(back), logits_of(made))


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        (None, "no d2t that says which they are: the map is lost"),
        (torch.zeros(20, dtype=torch.int64), "d2t is all zero, though 20 of the target's 64 tokens are drafted"),
        (torch.arange(20, 0, -1), "must be distinct tokens below 64"),
        (torch.full((20,), 50), "must be distinct tokens below 64"),
        (torch.full((20,), -1), "must be distinct tokens below 64"),
        (torch.full((20,), 2**63 - 1), "must be distinct tokens below 64"),
        (torch.ones(19, dtype=torch.int64), r"of shape \(19,\) where 20 integers are expected"),
        (torch.ones(20), "torch.float32 of shape"),
        (torch.ones(20, dtype=torch.int64), "t2d and d2t name different tokens"),
    ],
)
def test_a_lost_or_broken_map_is_refused(d2t: Tensor | None, message: str, tmp_path: Path) -> None:
    """Without it draft ids would be taken for target ids."""
    eagle(tmp_path / "out")
    rewrite(tmp_path / "out", lambda tensors: tensors.pop("d2t") if d2t is None else tensors.update({"d2t": d2t}))
    refused(tmp_path / "out", message)


# the target's own matrices


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_targets_embedding_may_come_along_and_no_other(dtype: torch.dtype, tmp_path: Path) -> None:
    made = eagle(tmp_path / "out")
    own = made.target.embedding.weight.detach().to(dtype, copy=True)
    rewrite(tmp_path / "out", lambda tensors: tensors.update({"embed_tokens.weight": own.clone()}))
    assert torch.equal(logits_of(read(tmp_path / "out", lookahead=3)), logits_of(made))
    own[[3, 40]] += 1
    rewrite(tmp_path / "out", lambda tensors: tensors.update({"embed_tokens.weight": own.clone()}))
    refused(tmp_path / "out", r"embed_tokens\.weight differs from tiny/llama's in 2 of 64 rows")
    rewrite(tmp_path / "out", lambda tensors: tensors.update({"embed_tokens.weight": own[:50].clone()}))
    refused(tmp_path / "out", r"embed_tokens\.weight is .* \(50, 32\), and tiny/llama has \(64, 32\)")
