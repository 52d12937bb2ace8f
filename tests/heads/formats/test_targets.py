"""Targets as people have them on disk: tied or not, in one file or in shards, the same tensors go out and come in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from heads.formats import export_heads, read_heads
from heads.target import Target
from tests.heads.formats.cases import MEDUSA, USUAL
from tests.heads.formats.engine import stored
from tests.heads.small import logits_of, small_heads
from tests.tiny import tiny_model


@pytest.mark.parametrize("size", ["5GB", "20KB"])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_sharded_targets_give_the_same_tensors(tied: bool, size: str, tmp_path: Path) -> None:
    model = tiny_model("llama", layers=8, dtype=torch.float32, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "target", max_shard_size=size)
    assert (tmp_path / "target" / "model.safetensors.index.json").exists() == (size == "20KB")
    target = Target.load(str(tmp_path / "target"), dtype="auto")

    made = small_heads(target=target, **USUAL)
    export_heads(made, "speculators", tmp_path / "speculators")
    assert torch.equal(stored(tmp_path / "speculators")[1]["embed_tokens.weight"], model.model.embed_tokens.weight)
    back = read_heads(tmp_path / "speculators", Target(model, name=target.name)).heads
    assert back.config == made.config and torch.equal(logits_of(back), logits_of(made))

    shared = small_heads(target=target, **MEDUSA)
    export_heads(shared, "medusa", tmp_path / "medusa", engine="vllm")
    assert torch.equal(stored(tmp_path / "medusa")[1]["lm_heads.2.weight"], model.lm_head.weight)
    assert read_heads(tmp_path / "medusa", Target(model)).heads.config.options["own_output"] is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_flat_export_is_as_large_as_the_heads_and_holds_nothing_of_the_target(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    made = small_heads(target=Target(tiny_model("llama", layers=8, vocab=2048, dtype=dtype)), **USUAL)
    export_heads(made, "eagle3", tmp_path / "out")
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert size <= 1.05 * sum(parameter.numel() for parameter in made.parameters()) * dtype.itemsize
    theirs = [value for value in made.target.model.state_dict().values() if value.dim() == 2]
    for value in stored(tmp_path / "out")[1].values():
        assert not any(value.shape == other.shape and torch.equal(value, other) for other in theirs)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gptneox", "phi3"])
def test_other_families_are_targets_too(family: str, tmp_path: Path) -> None:
    target = Target(tiny_model(family, layers=8))
    made = small_heads(target=target, **USUAL, draft_vocab=20)
    for form in ("eagle3", "speculators"):
        export_heads(made, form, tmp_path / form)
        back = read_heads(tmp_path / form, target, lookahead=3).heads
        assert back.config == made.config and torch.equal(logits_of(back), logits_of(made))
