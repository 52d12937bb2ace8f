"""Speculators, Medusa and DFlash checkpoints of others: each trap is read rightly, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from heads.eagle import Eagle
from heads.formats import export_heads, import_heads
from tests.heads.formats.cases import CASES, FULL, OTHER, drafted
from tests.heads.formats.edit import WEIGHTS, dflash, eagle, medusa, read, reconfigure, refused, rewrite
from tests.heads.small import batch_of, logits_of, random_ids, relative, small_heads, small_target

LAYER = "transformer_layer_config"


# speculators


@pytest.mark.parametrize(
    ("values", "drop", "message"),
    [
        ({"norm_before_residual": True}, "", "norm_before_residual is true"),
        ({}, "norm_before_residual", "lacks norm_before_residual, and means true without it"),
        ({"norm_before_fc": True}, "", "norm_before_fc is true"),
        ({"speculators_model_type": "peagle"}, "", "speculators_model_type is 'peagle'"),
        ({LAYER: {"model_type": "qwen3", "num_attention_heads": 4}}, "", "model_type is 'qwen3'"),
        ({LAYER: []}, "", "must be an object"),
        ({}, "eagle_aux_hidden_state_layer_ids", ""),
    ],
)
def test_speculators_settings(values: dict[str, Any], drop: str, message: str, tmp_path: Path) -> None:
    made = eagle(tmp_path / "out", "speculators", lookahead=4)
    reconfigure(tmp_path / "out", drop=(drop,), **values)
    if message:
        refused(tmp_path / "out", message)
    else:
        assert read(tmp_path / "out").config == made.config, "its own count of tokens, and the default taps"


def test_the_recorded_target_may_have_moved(tmp_path: Path) -> None:
    made = small_heads(target=small_target(layers=8), **OTHER | FULL)
    export_heads(made, "speculators", tmp_path / "out", target_name="/model/from_s3")
    done = import_heads(tmp_path / "out", small_target(layers=8), tmp_path / "heads")
    assert done.recorded_target == "/model/from_s3" and done.heads.config.target.name == "tiny/llama"
    with pytest.raises(FileExistsError):
        import_heads(tmp_path / "out", small_target(layers=8), tmp_path / "heads")


# Medusa


def test_medusa_heads_and_layers_are_counted_in_the_tensors(tmp_path: Path) -> None:
    made = medusa(tmp_path / "out", lookahead=4, layers=2)
    reconfigure(tmp_path / "out", medusa_num_heads=5, medusa_num_layers=1)  # as published configs do
    back = read(tmp_path / "out")
    assert (back.config.lookahead, back.config.options["layers"]) == (4, 2)
    assert torch.equal(logits_of(back), logits_of(made))
    refused(tmp_path / "out", "has 4 Medusa heads: a look-ahead of 9 is not theirs", lookahead=9)
    (tmp_path / "out" / "config.json").unlink()
    assert torch.equal(logits_of(read(tmp_path / "out")), logits_of(made))


def test_a_missing_or_surplus_medusa_head_is_listed(tmp_path: Path) -> None:
    medusa(tmp_path / "out", lookahead=4)
    rewrite(tmp_path / "out", lambda tensors: tensors.pop("2.0.linear.bias"))
    refused(tmp_path / "out", r"missing 2\.0\.linear\.bias")
    rewrite(tmp_path / "out", lambda tensors: tensors.pop("2.0.linear.weight"))
    refused(tmp_path / "out", r"unexpected 3\.0\.linear\.bias, 3\.0\.linear\.weight")


def test_an_output_matrix_that_is_the_targets_is_shared_again(tmp_path: Path) -> None:
    medusa(tmp_path / "out", "vllm")
    assert read(tmp_path / "out").config.options["own_output"] is False
    rewrite(tmp_path / "out", lambda tensors: tensors["lm_heads.1.weight"][5].add_(1))
    assert read(tmp_path / "out").config.options["own_output"] is True


def test_vllms_medusa_without_biases_has_zero_ones(tmp_path: Path) -> None:
    made = medusa(tmp_path / "out", "vllm", own_output=True)
    for name, value in made.named_parameters():
        value.data.zero_() if name.endswith("bias") else None
    rewrite(tmp_path / "out", lambda tensors: [tensors.pop(n) for n in list(tensors) if n.endswith("bias")])
    assert torch.equal(logits_of(read(tmp_path / "out")), logits_of(made))
    rewrite(tmp_path / "out", lambda tensors: tensors.update({"blocks.1.layers.0.bias": torch.zeros(32)}))
    refused(tmp_path / "out", r"missing blocks\.0\.layers\.0\.bias, blocks\.2\.layers\.0\.bias")


def test_vllms_medusa_may_hold_all_rows_and_a_map(tmp_path: Path) -> None:
    """The map then says which rows are kept."""
    made = medusa(tmp_path / "out", "vllm", own_output=True)
    ids = torch.tensor([40, 3, 17])
    rewrite(tmp_path / "out", lambda tensors: tensors.update({"token_map": ids}))
    back = read(tmp_path / "out")
    assert back.target_ids.tolist() == [3, 17, 40]
    assert relative(logits_of(back), logits_of(made)[..., back.target_ids]) < 1e-12  # products of other shapes round


def test_one_matrix_may_serve_all_heads(tmp_path: Path) -> None:
    """The target's own rows are shared again; a trained one becomes each head's."""
    made = medusa(tmp_path / "out", "vllm", draft_vocab=20)

    def share(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("lm_heads.") and "0" not in name]:
            del tensors[name]

    rewrite(tmp_path / "out", share)
    refused(tmp_path / "out", r"missing lm_heads\.1\.weight, lm_heads\.2\.weight")
    reconfigure(tmp_path / "out", original_lm_head=True)
    back = read(tmp_path / "out")
    assert back.config == made.config and torch.equal(logits_of(back), logits_of(made))
    rewrite(tmp_path / "out", lambda tensors: tensors["lm_heads.0.weight"][5].add_(1))
    back = read(tmp_path / "out")
    assert back.config.options["own_output"] is True
    outputs = [value for name, value in back.state_dict().items() if name.startswith("outputs.")]
    assert len(outputs) == 3 and all(torch.equal(value, outputs[0]) for value in outputs)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (None, "20 rows where tiny/llama has 64 tokens, and there is no token_map"),
        (torch.zeros(20, dtype=torch.int64), "must hold distinct tokens below 64"),
        (torch.arange(50, 70), "must hold distinct tokens below 64"),
        (torch.arange(19), "beside an output matrix of 20 rows"),
        (torch.ones(20), "token_map is torch.float32"),
    ],
)
def test_a_lost_medusa_map_is_refused(ids: Tensor | None, message: str, tmp_path: Path) -> None:
    medusa(tmp_path / "out", "vllm", own_output=True, draft_vocab=20)
    rewrite(tmp_path / "out", lambda t: t.pop("token_map") if ids is None else t.update({"token_map": ids}))
    refused(tmp_path / "out", message)


# DFlash


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_target_layers": 12}, "num_target_layers is 12, and tiny/llama has 8 layers"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types must all be full_attention"),
        ({"dflash_config": {"target_layer_ids": [1, 3, 4]}}, "lacks mask_token_id"),
        ({"dflash_config": {"mask_token_id": 9}}, "lacks target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 9, "target_layer_ids": [1, 3, 7]}}, "must be 0 to 6: the last layer's"),
        (
            {"dflash_config": {"mask_token_id": 9, "target_layer_ids": [1, 3]}},
            r"fc\.weight is \(32, 96\) where \(32, 64\)",
        ),
        ({"dflash_config": {"mask_token_id": 99, "target_layer_ids": [1, 3, 4]}}, "mask_token_id must be 0 to 63"),
        ({"dflash_config": {"causal": True}}, "causal is true"),
        ({"block_size": 1}, "a block_size of 1 drafts 1 to 0 tokens"),
        ({"rope_theta": None}, "lacks rope_theta"),
    ],
)
def test_dflash_settings_that_block_heads_cannot_have_are_refused(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    dflash(tmp_path / "out")
    reconfigure(tmp_path / "out", **values)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "out")


def test_dflash_layers_are_counted_and_its_block_may_be_cut_short(tmp_path: Path) -> None:
    """The config's count of layers does not matter; a shorter block has fewer masks."""
    dflash(tmp_path / "out")
    reconfigure(tmp_path / "out", num_hidden_layers=5)
    back = read(tmp_path / "out", lookahead=2)
    assert (back.config.lookahead, back.config.options["layers"]) == (2, 2)
    refused(tmp_path / "out", "a block_size of 5 drafts 1 to 4 tokens, not 5", lookahead=5)
    rewrite(tmp_path / "out", lambda tensors: tensors.update({"mask_embedding": torch.ones(32)}))
    refused(tmp_path / "out", "unexpected mask_embedding")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dspark_bonus_anchor": True}, "the root's slot drafts nothing"),
        ({"sample_from_anchor": False}, "the root's slot drafts nothing"),
        ({"markov_head_type": "gated"}, "markov_head_type is 'gated'"),
        ({"block_size": 0}, "block_size must be a positive integer"),
        ({"draft_vocab_size": 30}, "draft_vocab_size is 30 and lm_head.weight has 20 rows"),
    ],
)
def test_dspark_settings_that_block_heads_cannot_have_are_refused(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    export_heads(CASES["dspark full"].make(), "dspark", tmp_path / "out")
    reconfigure(tmp_path / "out", **values)
    refused(tmp_path / "out", message)


def test_a_dspark_confidence_may_be_left_out_and_has_no_bias(tmp_path: Path) -> None:
    export_heads(CASES["dspark full"].make(), "dspark", tmp_path / "out")
    refused(tmp_path / "out", "a block_size of 4 drafts 1 to 4 tokens, not 5", lookahead=5)
    rewrite(tmp_path / "out", lambda tensors: tensors["confidence_head.proj.bias"].add_(1))
    refused(tmp_path / "out", "the confidence of block heads has no bias")
    parts = ("confidence_head.proj.bias", "confidence_head.proj.weight")
    rewrite(tmp_path / "out", lambda tensors: [tensors.pop(part) for part in parts])
    assert read(tmp_path / "out").config.options["confidence"] is False
    rewrite(tmp_path / "out", lambda tensors: tensors.pop("d2t"))
    refused(tmp_path / "out", "the map is lost")


def test_unshifted_slots_draft_what_training_unrolled(tmp_path: Path) -> None:
    """DFlash's slots speak of their own place, in training as in decoding."""
    dflash(tmp_path / "out")
    back, text = read(tmp_path / "out"), random_ids(12)
    with torch.no_grad():
        steps = list(back.unroll(batch_of(back.target, back.config.taps, text)))
    row = int((steps[0].row == 6).nonzero()[0, 0])  # the anchor is the token at 7
    ours = drafted(back, text[0, :7], int(text[0, 7]), text[0, 8:11].tolist())
    for step, logits in zip(steps, ours, strict=True):
        assert torch.allclose(step.logits[row], logits, rtol=1e-10, atol=1e-10)


def test_what_is_of_no_format_says_what_it_holds(tmp_path: Path) -> None:
    save_file({"lm_head.weight": torch.ones(4, 4), "other": torch.ones(1)}, tmp_path / WEIGHTS)
    refused(tmp_path, r"is of none of the formats speculators, .* \(it holds lm_head\.weight, other\)")
    assert Eagle.default_taps(small_target(layers=8)) == (2, 4, 5)
