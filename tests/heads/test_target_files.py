"""Targets as they lie on disk: tied or not, whole or in shards, alone or inside a larger model; and incomplete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from heads.target import Target
from tests.heads.small import random_ids
from tests.tiny import tiny_model


def alone(tied: bool) -> Any:
    """A text model whose output matrix is its embedding, by the same memory or as a copy."""
    model = tiny_model("gemma3", dtype=torch.float32, tie_word_embeddings=tied)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    return model


def nested(inner: Any, tied: bool) -> Any:
    """The same text model as a part of one that also reads pictures."""
    vision = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 8, "patch_size": 4}
    text = inner.config.to_dict() | {"tie_word_embeddings": tied}
    config = Gemma3Config(text_config=text, vision_config=vision, tie_word_embeddings=tied, mm_tokens_per_image=4)
    model = Gemma3ForConditionalGeneration(config).float()
    model.model.language_model.load_state_dict(inner.model.state_dict())
    with torch.no_grad():
        model.lm_head.weight.copy_(inner.lm_head.weight)
    return model.eval()


def parts(target: Target) -> list[Tensor]:
    """All that heads may read of a target: embedding, layers, output matrix."""
    return [target.embedding.weight, *(p for _, p in sorted(target.layers.named_parameters())), target.output.weight]


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "nested"])
@pytest.mark.parametrize("size", ["5GB", "30KB"], ids=["one file", "shards"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_same_tensors_however_they_lie(inside: bool, size: str, tied: bool, tmp_path: Path) -> None:
    model = alone(tied)
    (nested(model, tied) if inside else model).save_pretrained(tmp_path, max_shard_size=size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (size == "30KB")
    found, wanted = Target.load(str(tmp_path), dtype=torch.float32), Target(model)
    ours, theirs = parts(found), parts(wanted)
    assert len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert found.identity().weights == wanted.identity().weights
    assert (found.num_layers, found.hidden_size, found.vocab_size) == (4, 32, 64)
    ids = random_ids(9)
    one, other = (target.forward(ids, taps=(1, 2, 3), hidden=True) for target in (found, wanted))
    assert one.taps is not None and other.taps is not None and torch.equal(one.taps, other.taps)
    torch.testing.assert_close(one.logits, other.logits, rtol=1e-5, atol=1e-5)


def without(folder: Path, name: str, instead: str | None = None) -> None:
    """Take a tensor out of the files, or give it another name."""
    tensors = load_file(folder / "model.safetensors")
    value = tensors.pop(name)
    if instead:
        tensors[instead] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("missing", ["lm_head.weight", "model.layers.2.mlp.up_proj.weight"])
@pytest.mark.parametrize("instead", [None, "head.weight"])
def test_made_up_weights_are_refused(missing: str, instead: str | None, tmp_path: Path) -> None:
    """transformers fills in what files lack with random numbers: heads would learn from noise."""
    tiny_model("llama", dtype=torch.float32).save_pretrained(tmp_path)
    without(tmp_path, missing, instead)
    with pytest.raises(ValueError) as caught:
        Target.load(str(tmp_path), dtype=torch.float32)
    told = str(caught.value)
    assert f"the files of {tmp_path} lack {missing}, so it would decode with made-up weights; there are " in told
    assert "model.embed_tokens.weight" in told or "lm_head.weight" in told
    assert ("and head.weight, which no part of it takes" in told) == (instead is not None)


def test_an_output_matrix_that_is_the_embedding_is_not_missed(tmp_path: Path) -> None:
    """A tied model's files hold no lm_head; that its config says so is what makes it whole."""
    tiny_model("llama", dtype=torch.float32, tie_word_embeddings=True).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert Target.load(str(tmp_path)).vocab_size == 64
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(ValueError, match=r"lack lm_head\.weight.*correct tie_word_embeddings in its config"):
        Target.load(str(tmp_path))
