"""EAGLE-3 as the package economize saves it: each setting is read rightly, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from heads.base import DraftHeads
from heads.formats import FormatError, export_heads, import_heads, read_heads
from heads.formats.eagle_layer import tensors
from heads.target import Target
from tests.heads.formats.cases import USUAL, drafted
from tests.heads.small import logits_of, random_ids, small_heads, small_target
from tests.tiny import tiny_model

# what version 0.3.2 wrote for heads that were given nothing but their draft vocabulary
SETTINGS: dict[str, Any] = {
    "aux_layers": None, "head": "own", "draft_vocab": 20, "intermediate_size": None, "num_heads": None,
    "num_kv_heads": None, "head_dim": None, "attention_bias": None, "rope_theta": None, "rope_scaling": None,
    "partial_rotary_factor": 1.0, "max_position_embeddings": None, "rms_norm_eps": None,
    "norm_before_residual": False, "zero_source_first": False, "train_steps": 3, "checkpoint_steps": False,
    "param_dtype": "float32",
}  # fmt: skip
WEIGHTS, CONFIG = "economize_model.safetensors", "economize_config.json"


def economize(folder: Path, techniques: list[dict[str, Any]] | None = None, **settings: Any) -> DraftHeads:
    """Random heads on the tiny target, as economize would have saved them with these settings."""
    theta = 10000.0 if settings.get("rope_theta") is None else settings["rope_theta"]
    made = small_heads(target=small_target(layers=8), **USUAL, draft_vocab=20, rope_theta=theta, rms_norm_eps=1e-6)
    folder.mkdir()
    held = {f"eagle3.{name}": value for name, value in tensors(made, "layer", torch.float64).items()}
    save_file(held, folder / WEIGHTS)
    told = {"technique": "eagle3", "config": SETTINGS | settings}
    config = {"economize_version": "0.3.2", "base_model": "org/target", "techniques": techniques or [told]}
    (folder / CONFIG).write_text(json.dumps(config))
    return made


def read(folder: Path, **options: Any) -> DraftHeads:
    return read_heads(folder, small_target(layers=8), **options).heads


def test_what_is_null_is_the_targets_own(tmp_path: Path) -> None:
    made = economize(tmp_path / "out")
    back = read(tmp_path / "out")
    assert back.config == made.config, "taps 2, 4, 5; the target's shape, norm and rotary base; three steps deep"
    assert torch.equal(logits_of(back), logits_of(made))
    text = random_ids(9)[0]
    for ours, theirs in zip(drafted(back, text, 5, [1, 2]), drafted(made, text, 5, [1, 2]), strict=True):
        assert torch.equal(ours, theirs)


def test_what_is_said_goes_before_the_targets(tmp_path: Path) -> None:
    economize(tmp_path / "out", rope_theta=777.0, rms_norm_eps=1e-3, aux_layers=[1, 3, 7], train_steps=5)
    config = read(tmp_path / "out").config
    assert (config.options["rope_theta"], config.options["rms_norm_eps"]) == (777.0, 1e-3)
    assert (config.taps, config.lookahead) == ((1, 3, 7), 5)
    assert read(tmp_path / "out", lookahead=2).config.lookahead == 2


def test_the_rotary_base_is_another_targets(tmp_path: Path) -> None:
    economize(tmp_path / "out")
    other = Target(tiny_model("llama", layers=8, rope_parameters={"rope_type": "default", "rope_theta": 5e5}))
    assert read_heads(tmp_path / "out", other).heads.config.options["rope_theta"] == 5e5
    scaled = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    stretched = Target(tiny_model("llama", layers=8, rope_parameters=scaled))
    with pytest.raises(FormatError, match=r"rope_parameters in the config of .* is of type 'linear'"):
        read_heads(tmp_path / "out", stretched)


def test_the_whole_vocabulary(tmp_path: Path) -> None:
    economize(tmp_path / "out", draft_vocab=None)
    held = load_file(tmp_path / "out" / WEIGHTS)
    held["eagle3.lm_head.weight"] = torch.randn(64, 32, dtype=torch.float64)
    held["eagle3.d2t"], held["eagle3.t2d"] = torch.zeros(64, dtype=torch.int64), torch.ones(64, dtype=torch.bool)
    save_file(held, tmp_path / "out" / WEIGHTS)
    assert read(tmp_path / "out").config.draft_vocab_size is None


def test_it_is_imported_with_the_target_that_it_names(tmp_path: Path) -> None:
    economize(tmp_path / "out")
    done = import_heads(tmp_path / "out", small_target(layers=8), tmp_path / "heads")
    assert (done.format, done.recorded_target) == ("economize", "org/target")
    assert (tmp_path / "heads" / "heads.safetensors").is_file()
    named = read_heads(tmp_path / "out" / WEIGHTS, small_target(layers=8))
    assert named.format == "economize", "the weights' file itself, with its own kind of config beside it"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head": "shared"}, "head is 'shared'"),
        ({"zero_source_first": True}, "zero_source_first is true"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not 1"),
        ({"norm_before_residual": True}, "norm_before_residual is true"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "is of type 'llama3'"),
        ({"draft_vocab": 30}, "draft_vocab_size is 30 and lm_head.weight has 20 rows"),
        ({"num_heads": 8, "head_dim": 8}, "num_attention_heads is 8 with head_dim 8"),
        ({"aux_layers": [1, 2]}, "reads 96 numbers, 3 taps of 32, and the taps are"),
        ({"train_steps": 0}, "train_steps must be a positive integer"),
    ],
)
def test_settings_that_our_layer_cannot_have_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    economize(tmp_path / "out", **settings)
    with pytest.raises(FormatError, match=message):
        read(tmp_path / "out")


@pytest.mark.parametrize(
    ("techniques", "message"),
    [
        ([{"technique": "medusa", "config": {}}], r"has the techniques \['medusa'\]"),
        ([{"technique": "eagle3"}, {"technique": "lookup"}], r"has the techniques \['eagle3', 'lookup'\]"),
        ([3], "techniques must be a list of objects"),
    ],
)
def test_only_eagle3_alone_is_imported(techniques: list[Any], message: str, tmp_path: Path) -> None:
    economize(tmp_path / "out", techniques=techniques)
    with pytest.raises(FormatError, match=message):
        read(tmp_path / "out")


def test_tensors_of_nobody_and_missing_ones_are_listed(tmp_path: Path) -> None:
    economize(tmp_path / "out")
    held = load_file(tmp_path / "out" / WEIGHTS)
    held["eagle3.layer.mlp.down.weight"] = held.pop("eagle3.layer.mlp.down_proj.weight")
    save_file(held, tmp_path / "out" / WEIGHTS)
    message = r"missing eagle3\.layer\.mlp\.down_proj\.weight; unexpected eagle3\.layer\.mlp\.down\.weight"
    with pytest.raises(FormatError, match=message):
        read(tmp_path / "out")
    save_file(held | {"fc.weight": torch.ones(1)}, tmp_path / "out" / WEIGHTS)
    with pytest.raises(FormatError, match=r"has tensors of no technique that its config names: fc\.weight"):
        read(tmp_path / "out")


def test_heads_go_there_by_the_flat_form(tmp_path: Path) -> None:
    made = small_heads(target=small_target(layers=8), **USUAL)
    with pytest.raises(FormatError, match="economize reads the eagle3 form: export to that"):
        export_heads(made, "economize", tmp_path / "out")
