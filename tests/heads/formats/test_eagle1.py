"""EAGLE-1 and 2 out and in: what each engine's loader expects, what published folders look like, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from heads.eagle1 import Eagle1
from heads.formats import FormatError, export_heads, read_heads
from tests.heads.formats.edit import WEIGHTS, reconfigure, refused, rewrite
from tests.heads.formats.engine import stored
from tests.heads.small import logits_of, relative, small_heads, small_target
from tests.tiny import tiny_model

LAYER = {
    **{f"self_attn.{name}_proj.weight": (32, 32) for name in "qo"},
    **{f"self_attn.{name}_proj.weight": (16, 32) for name in "kv"},
    "mlp.gate_proj.weight": (64, 32),
    "mlp.up_proj.weight": (64, 32),
    "mlp.down_proj.weight": (32, 64),
    "post_attention_layernorm.weight": (32,),
}
# as EAGLE's own repositories have it: a Llama configuration that names no rotary base
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "hidden_act": "silu", "bias": True,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "vocab_size": 64, "pad_token_id": 0,
}  # fmt: skip


def published(folder: Path, *, bias: bool = True, **config: Any) -> dict[str, Tensor]:
    """A folder as EAGLE's trainer leaves it, with the target's embedding beside the weights."""
    random = torch.Generator().manual_seed(3)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (32, 64), **({"fc.bias": (32,)} if bias else {})}
    shapes |= {f"layers.0.{name}": shape for name, shape in LAYER.items()}
    tensors = {name: 0.2 * torch.randn(shape, generator=random) for name, shape in shapes.items()}
    embedding = small_target(layers=8).embedding.weight.detach().float()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors | {"embed_tokens.weight": embedding.contiguous()}, folder / WEIGHTS)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return tensors


@pytest.mark.parametrize("bias", [True, False])
def test_a_published_folder_comes_in(bias: bool, tmp_path: Path) -> None:
    """Whether fc has a bias is told by the tensors: published configs are wrong about it."""
    tensors = published(tmp_path, bias=bias, bias_in_config=True)
    done = read_heads(tmp_path, small_target(layers=8), lookahead=4)
    made = done.heads
    assert done.format == "eagle1" and isinstance(made, Eagle1)
    assert (made.config.kind, made.config.lookahead, made.config.taps) == ("eagle1", 4, (8,))
    options = made.config.options
    assert options["bias"] is bias and options["rope_theta"] == 10000.0 and options["rms_norm_eps"] == 1e-6
    assert (options["num_attention_heads"], options["num_key_value_heads"], options["head_dim"]) == (4, 2, 8)
    own = made.state_dict()
    assert torch.equal(own["fc.weight"], tensors["fc.weight"])
    assert torch.equal(own["layer.q_proj.weight"], tensors["layers.0.self_attn.q_proj.weight"])
    assert torch.equal(own["layer.down_proj.weight"], tensors["layers.0.mlp.down_proj.weight"])
    assert ("fc.bias" in own) is bias and len(own) == len(tensors)


def test_each_engine_gets_what_its_loader_expects(tmp_path: Path) -> None:
    target = small_target(layers=8)
    without = small_heads("eagle1", target, bias=False)
    done = export_heads(without, "eagle1", tmp_path / "vllm", engine="vllm")
    config, tensors = stored(tmp_path / "vllm")
    assert done.engines == ("vllm",) and done.notes == ()
    assert config["architectures"] == ["LlamaForCausalLM"] and config["bias"] is False and "fc.bias" not in tensors
    assert set(tensors) == {"fc.weight"} | {f"layers.0.{name}" for name in LAYER}
    done = export_heads(without, "eagle1", tmp_path / "sglang", engine="sglang")
    config, tensors = stored(tmp_path / "sglang")
    assert done.engines == ("sglang",) and config["architectures"] == ["LlamaForCausalLMEagle"]
    assert config["bias"] is True and tensors["fc.bias"].tolist() == [0.0] * 32
    back = read_heads(tmp_path / "sglang", target, lookahead=3).heads
    assert torch.equal(logits_of(back), logits_of(without)), "a bias of zeros adds nothing"
    with_bias = small_heads("eagle1", target)
    assert export_heads(with_bias, "eagle1", tmp_path / "own").engines == ()
    with pytest.raises(
        FormatError, match=r"vLLM's EAGLE layer has no bias on fc: train with heads\.options\.bias false"
    ):
        export_heads(with_bias, "eagle1", tmp_path / "none", engine="vllm")


def test_a_draft_vocabulary_stays_behind_and_is_told(tmp_path: Path) -> None:
    target = small_target(layers=8)
    made = small_heads("eagle1", target, draft_vocab=20)
    done = export_heads(made, "eagle1", tmp_path / "out")
    assert done.notes == ("the draft vocabulary of 20 stays behind: engines draft over all tokens",)
    back = read_heads(tmp_path / "out", target, lookahead=3).heads
    assert back.draft_ids is None and made.draft_ids is not None
    assert relative(logits_of(back)[..., made.draft_ids], logits_of(made)) < 1e-12


def test_what_has_no_such_form_is_refused(tmp_path: Path) -> None:
    target = small_target(layers=8)
    with pytest.raises(FormatError, match="heads of kind eagle have no eagle1 form"):
        export_heads(small_heads("eagle", target), "eagle1", tmp_path / "out")
    with pytest.raises(FormatError, match="attend the last 6 tokens, which has no place in the eagle1 form"):
        export_heads(small_heads("eagle1", target, window=6), "eagle1", tmp_path / "out")
    from heads.target import Target

    gemma = Target(tiny_model("gemma2", layers=8))
    with pytest.raises(FormatError, match="scales its embeddings"):
        export_heads(small_heads("eagle1", gemma), "eagle1", tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (lambda t: t.pop("layers.0.mlp.up_proj.weight"), {}, r"missing layers\.0\.mlp\.up_proj\.weight"),
        (lambda t: t.update({"layers.0.input_layernorm.weight": torch.ones(32)}), {}, "unexpected layers.0.input_lay"),
        (lambda t: t.update({"layers.1.mlp.up_proj.weight": torch.ones(64, 32)}), {}, "more than one decoder layer"),
        (lambda t: t.update({"fc.bias": torch.ones(31)}), {}, r"fc\.bias is \(31,\) where \(32,\) is expected"),
        (lambda t: t["embed_tokens.weight"].add_(1), {}, "embed_tokens.weight differs from tiny/llama's in 64 of 64"),
        (lambda t: None, {"hidden_size": 48}, "hidden_size is 48 in its config and 32 in fc.weight"),
        (lambda t: None, {"vocab_size": 65}, "vocab_size 65; tiny/llama has 32 and 64"),
        (lambda t: None, {"num_attention_heads": 5}, "num_attention_heads is 5 with head_dim 6"),
        (lambda t: None, {"attention_bias": True}, "attention_bias is true"),
        (lambda t: None, {"rope_scaling": {"type": "linear", "factor": 2}}, "is of type 'linear'"),
    ],
)
def test_what_does_not_fit_is_named(change: Any, config: dict[str, Any], message: str, tmp_path: Path) -> None:
    published(tmp_path)
    rewrite(tmp_path, change)
    reconfigure(tmp_path, **config)
    refused(tmp_path, message)
